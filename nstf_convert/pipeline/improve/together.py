"""How many groups of weights a GPU encodes at the same time: as many as its memory holds."""

from collections.abc import Iterable

from nstf_convert.pipeline.machine import Machine

# What a group takes of a GPU while it is encoded: for each weight it, what it becomes and the errors, each once more than
# float32 needs; for each entry of its Hessian that, damped and factored; and while that is factored, in float64.
WEIGHT_BYTES, HESSIAN_BYTES, FACTOR_BYTES = 20, 12, 20


def taken_bytes(groups: Iterable[tuple[int, int]]) -> int:
    """What groups of (inputs, weights) take at most while they are encoded at the same time."""
    sizes = list(groups)
    squares = [inputs**2 for inputs, _ in sizes]
    weights = sum(count for _, count in sizes)
    of_factor = 4 * weights + FACTOR_BYTES * max(squares, default=0)
    return HESSIAN_BYTES * sum(squares) + max(WEIGHT_BYTES * weights, of_factor)


def room_bytes(machine: Machine, activations: int) -> int:
    """What groups may take while they wait and are encoded: of a GPU the bound without what else is there. activations:
    bytes of all batches before the widest group. A CPU gains nothing from it, and encodes each group at once."""
    return machine.gpu_bytes - 2 * activations - 2 * machine.resident_bytes if machine.on_gpu else 0


def turns(groups: Iterable[tuple[int, int]], room: int) -> list[list[tuple[int, int]]]:
    """Groups of (inputs, weights) in their order, divided into those that are encoded at the same time."""
    found: list[list[tuple[int, int]]] = []
    for group in groups:
        if found and taken_bytes([*found[-1], group]) <= room:
            found[-1].append(group)
        else:
            found.append([group])
    return found

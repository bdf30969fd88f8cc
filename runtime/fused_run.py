"""Steps of a plan that the extension runs in one call: convolutions from codes, with what follows them, poolings, and a head
of a plain matrix behind global pooling.

Between the layers of a small network Python took as long as a third of them. And a pooling of torch's leaves torch's own
threads looking for more work for milliseconds, on the cores that the threads of the extension want.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nstf.kernels import convolution
from nstf.kernels.cpu import convolution as cpu
from nstf.kernels.cpu import ext
from nstf.kernels.formats import EncodedTensor
from nstf.runtime.fused_steps import POOLINGS, ConvolutionStep, OtherStep, Value, held_by
from nstf.runtime.modules import geometry_of

Step = ConvolutionStep | OtherStep


def in_runs(steps: Sequence[Step], result: str) -> "list[Step | Run]":
    """Steps with those that one call can do made one: of one value that came before, and giving one that is read later."""
    found: list[Step | Run] = []
    at = 0
    while at < len(steps):
        best = at
        reads: set[str] = set()
        own: set[str] = set()
        flat: set[str] = set()  # values that are no images any more
        source = ""
        for end in range(at, len(steps)):
            step = steps[end]
            if flattened(step) and end > at and _mean(steps[end - 1]) and steps[end - 1].out in step.reads:
                flat.add(step.out)
            elif matrix(step) is not None and step.reads <= flat:
                flat.add(step.out)
            elif step.reads & flat or not (isinstance(step, ConvolutionStep) or pooling(step) is not None):
                break
            reads |= step.reads - own
            own.add(step.out)
            later = {result}.union(*(s.reads for s in steps[end + 1 :]))
            if len(reads) > 1:
                break
            if own & later == {step.out}:
                best, source = end + 1, next(iter(reads))
        if best == at:
            found.append(steps[at])
            at += 1
        else:
            part = list(steps[at:best])
            found.append(Run(source, part[-1].out, part, _dead(part)))
            at = best
    return found


def pooling(step: Step) -> "nn.MaxPool2d | nn.AdaptiveAvgPool2d | None":
    """The module of a step that takes the largest value of each window of an image, or the mean of each channel, and does
    nothing else."""
    module = step.target if isinstance(step, OtherStep) else None
    if not isinstance(module, POOLINGS) or type(module).forward not in [kind.forward for kind in POOLINGS]:
        return None
    if isinstance(module, nn.AdaptiveAvgPool2d) and not _of_all(module):
        return None
    assert isinstance(step, OtherStep)
    return module if len(step.args) == 1 and isinstance(step.args[0], Value) and not step.kwargs else None


def _mean(step: Step) -> bool:
    return isinstance(pooling(step), nn.AdaptiveAvgPool2d)


def flattened(step: Step) -> bool:
    """Whether a step makes rows of images and nothing else."""
    if not isinstance(step, OtherStep):
        return False
    module = step.target
    if type(module) is nn.Flatten:
        return (module.start_dim, module.end_dim) == (1, -1) and len(step.args) == 1 and not step.kwargs
    return module is torch.flatten and step.args[1:] == (1,) and not step.kwargs


def matrix(step: Step) -> "nn.Linear | None":
    """The module of a step that is a product with a plain matrix in float32."""
    module = step.target if isinstance(step, OtherStep) else None
    if type(module) is not nn.Linear or module.weight.dtype != torch.float32:
        return None
    assert isinstance(step, OtherStep)
    return module if len(step.args) == 1 and isinstance(step.args[0], Value) and not step.kwargs else None


def _of_all(pool: nn.AdaptiveAvgPool2d) -> bool:
    """Whether it leaves one number of each channel."""
    return pool.output_size in (1, (1, 1), [1, 1])


def _dead(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """Of each step the values that no later one reads; the last one's own is the run's result."""
    later: set[str] = {steps[-1].out}
    found = []
    for step in reversed(steps):
        found.append(tuple(step.reads - later))
        later |= step.reads
    return found[::-1]


class _Number:
    """The values of one buffer or parameter. They may be changed, in place or for others: their address is asked for at
    every call, and looked at closely where the tensor or its memory is another."""

    def __init__(self, module: nn.Module, name: str, rows: int) -> None:
        self.module, self.name, self.rows = module, name, rows
        self.place: Any = module._buffers if name in module._buffers else module._parameters
        # (the tensor, what holds its values, their address). Replaced as a whole, since other threads may run the model.
        self.known: tuple[Tensor | None, Tensor | None, int | None] = (None, None, 0)

    def now(self) -> tuple[Tensor | None, Tensor | None, int | None]:
        """What `known` is, as things are. No address: these are not `rows` numbers in this machine's memory. The second one
        must be kept as long as the address is used."""
        tensor, known = self.place.get(self.name), self.known
        if tensor is not known[0] or (tensor is not None and tensor.data_ptr() != known[2]):
            known = self.known = self._look()
        return known

    def _look(self) -> tuple[Tensor | None, Tensor | None, int | None]:
        found: Tensor | None = held_by(self.module, self.name)
        if found is None:
            return None, None, 0
        if found.numel() != self.rows or not found.is_cpu:
            return found, None, None
        if found.dtype != torch.float32 or not found.is_contiguous():
            made = found.float().contiguous()
            return None, made, made.data_ptr()  # made anew at each call
        return found, found.detach(), found.data_ptr()


@dataclass
class _Compiled:
    """steps: the extension's, of so many convolutions and matrices. numbers, norms: by place what follows them, five numbers
    each; inside a chain nothing does. weights, state: what the modules were like."""

    steps: Any
    convolutions: int
    numbers: list[tuple[int, _Number]]
    norms: list[tuple[int, nn.BatchNorm2d]]
    weights: list[EncodedTensor]
    state: list[Any]

    def holds(self, steps: Sequence[Step]) -> bool:
        """Whether the steps' modules are as they were."""
        weights, state = _state(steps)
        return state == self.state and all(map(operator.is_, weights, self.weights))


@dataclass
class Run:
    """Steps in a row. source, out: names of the value that they read, and of the one that they give."""

    source: str
    out: str
    steps: list[Step]
    dead: list[tuple[str, ...]]
    made: dict[str, _Compiled | None] = field(default_factory=dict)  # by instruction set

    @property
    def reads(self) -> frozenset[str]:
        return frozenset((self.source,))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "made": {}}  # a copy has weights of its own

    def run(self, values: dict[str, Any]) -> Tensor:
        x: Tensor = values[self.source]
        y = self._at_once(x) if x.dim() == 4 and x.numel() else None
        if y is not None:
            return y
        own = {self.source: x}
        for step, dead in zip(self.steps, self.dead, strict=True):
            own[step.out] = step.run(own)
            for name in dead:
                del own[name]
        return own[self.out]

    def _at_once(self, x: Tensor) -> Tensor | None:
        """All in one call, or None where a step has no kernel, or images of this size have none."""
        if x.dtype != torch.float32 or not cpu.available():
            return None
        isa = ext.isa()
        made = self.made.get(isa)
        if isa not in self.made or (made is not None and not made.holds(self.steps)):
            made = self.made[isa] = _compiled(self.steps, self.source)
        if made is None:
            return None
        count, channels, height, width = x.shape
        size = made.steps.sizes(channels, height, width)
        if size is None:
            return None
        numbers, eps, kept = [0] * (5 * made.convolutions), [0.0] * made.convolutions, []
        for at, number in made.numbers:
            known = number.now()
            if known[2] is None:
                return None
            numbers[at] = known[2]
            kept.append(known)
        for at, norm in made.norms:
            eps[at] = norm.eps
        # Of one channel or one pixel both layouts hold; the usual one is then taken.
        last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        x = x.contiguous(memory_format=layout)
        flat = flattened(self.steps[-1]) or matrix(self.steps[-1]) is not None
        sizes, order = ((size[0],), torch.contiguous_format) if flat else (size, layout)
        y = torch.empty(count, *sizes, dtype=torch.float32, device="cpu", memory_format=order)
        made.steps.run_at(
            x.data_ptr(),
            count,
            (channels, height, width),
            numbers,
            eps,
            y.data_ptr(),
            last,
            torch.get_num_threads(),
        )
        return y


def _state(steps: Sequence[Step]) -> tuple[list[EncodedTensor], list[Any]]:
    """What compiled steps are made from: compared at every call, since modules may be changed."""
    weights: list[EncodedTensor] = []
    found: list[Any] = []
    for step in steps:
        if isinstance(step, ConvolutionStep):
            module = step.convolution
            weights.append(module._modules["weight_encoded"].encoded)
            found += (module.stride, module._reversed_padding_repeated_twice, module.dilation, module.groups)
        elif flattened(step):
            found.append(True)
        else:
            pool = step.target
            if isinstance(pool, nn.Linear):
                found += (pool.in_features, pool.out_features)
                continue
            if isinstance(pool, nn.AdaptiveAvgPool2d):
                found.append(pool.output_size)
                continue
            found += (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
            found.append(pool.return_indices)
    return weights, found


def _compiled(steps: Sequence[Step], source: str) -> _Compiled | None:
    """The extension's steps, or None where one of them has no kernel."""
    made = ext.ImageSteps()
    numbers: list[tuple[int, _Number]] = []
    norms: list[tuple[int, nn.BatchNorm2d]] = []
    convolutions = 0
    last_read = {name: i for i, step in enumerate(steps) for name in step.reads}
    places, free, count = {source: 0}, list[int](), 1

    def place() -> int:
        nonlocal count
        if free:
            return free.pop()
        count += 1
        return count - 1

    def over(step: Step, i: int) -> list[int]:
        return [places[read] for read in step.reads if last_read[read] == i and places[read] != 0]

    for i, step in enumerate(steps):
        if isinstance(step, ConvolutionStep):
            encoded = step.convolution.weight_encoded.encoded
            stages = convolution.stages(encoded, geometry_of(step.convolution))
            if stages is None:
                return None
            at = places[step.x]
            for stage in stages[:-1]:
                to = place()
                made.add(stage, at, to, -1, *_UNBOUNDED)
                convolutions += 1
                if at != places[step.x]:
                    free.append(at)
                at = to
            places[step.out] = place()
            added = -1 if step.added is None else places[step.added]
            made.add(stages[-1], at, places[step.out], added, *step.bounds)
            norm = step.normalisation
            owners = [] if norm is None else [(norm, n) for n in _NAMES]
            for j, (owner, name) in enumerate([*owners, (step.convolution, "bias")], 4 - len(owners)):
                numbers.append((5 * convolutions + j, _Number(owner, name, encoded.shape[0])))
            if norm is not None:
                norms.append((convolutions, norm))
            convolutions += 1
            if at != places[step.x]:
                free.append(at)
        elif flattened(step):
            places[step.out] = places[next(iter(step.reads))]  # the same numbers
            continue
        elif (product := matrix(step)) is not None:
            rows, columns = product.out_features, product.in_features
            places[step.out] = place()
            made.add_linear(places[next(iter(step.reads))], places[step.out], columns, rows)
            numbers.append((5 * convolutions + 2, _Number(product, "weight", rows * columns)))
            numbers.append((5 * convolutions + 4, _Number(product, "bias", rows)))
            convolutions += 1
        else:
            pool: Any = step.target
            if isinstance(pool, nn.AdaptiveAvgPool2d):
                if not _of_all(pool):
                    return None
                places[step.out] = place()
                made.add_mean(places[step.args[0].name], places[step.out])
                free += over(step, i)
                continue
            two = [_two(v) for v in (pool.kernel_size, pool.stride, pool.padding)]
            if pool.ceil_mode or pool.return_indices or _two(pool.dilation) != (1, 1):
                return None
            if any(2 * before > kernel for kernel, before in zip(two[0], two[2], strict=True)):
                return None  # which torch refuses
            places[step.out] = place()
            made.add_pool(places[step.args[0].name], places[step.out], *two)
        free += over(step, i)
    return _Compiled(made, convolutions, numbers, norms, *_state(steps))


_UNBOUNDED = (float("-inf"), float("inf"))
# What a normalisation reads, in the extension's order.
_NAMES = ("running_mean", "running_var", "weight", "bias")


def _two(side: Any) -> tuple[int, int]:
    return (side, side) if isinstance(side, int) else (side[0], side[1])

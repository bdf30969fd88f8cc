"""Second moments of layer inputs: the Hessians `H = E[x x^T]` that rounding and low-rank fitting minimise against.

`||(W - W^) X||_F^2 = N tr((W - W^) H (W - W^)^T)` for N tokens, so H is all that a layer-wise method needs to
know about the data (Hassibi and Stork 1993; Frantar et al., GPTQ, 2022).
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Columns of a second moment that a CPU makes at a time: of a symmetric matrix the half above them is enough.
STRIP = 192
# Sums of batches that wait to be added, at most, where more of them than workers fit.
PARTS_BYTES = 16 << 20
# Rows per convolution call that enter the second moment; positions of one image are highly correlated.
MAX_CONV_ROWS = 4096


@dataclass(frozen=True)
class Moment:
    """`hessian`: [in, in] float32, the (weighted) mean of x x^T over `tokens` inputs; `members`: the layers that
    share it."""

    hessian: Tensor
    tokens: int
    members: tuple[str, ...]


class InputMoments:
    """Gathers the second moments of the inputs of watched layers by forward hooks.

    Layers that read the very same tensor (q, k and v; gate and up) share one matrix, convolutions where they unfold it
    alike: it is found when the first batch runs, by identity of the input.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor] | None = None,
        wanted: Callable[[str], bool] = lambda name: True,
        turn: Callable[[str], AbstractContextManager[None]] = lambda key: nullcontext(),
    ) -> None:
        """weights: by the first layer that reads an input, what each of its rows counts, [rows of all batches] in the
        order in which they come; inputs without count all rows the same. wanted: whether the input of a watched layer is to
        be gathered now. turn: what is entered to add under a key, where several threads run batches."""
        self._weights, self._wanted, self._turn = dict(weights or {}), wanted, turn
        self._sums: dict[str, Tensor] = {}
        self._mass: dict[str, float | Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._key_of: dict[str, str] = {}
        # Each thread's last input; it must not outlive the layer for this.
        self._last = threading.local()

    def watch(self, name: str, module: nn.Module) -> Any:
        """Starts gathering for a Linear, Conv or Conv1D layer; returns the hook's handle."""

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not self._wanted(name):
                return
            x = args[0]
            if name not in self._key_of:
                last, geometry, of = getattr(self._last, "read", (lambda: None, (), name))
                self._key_of[name] = of if last() is x and geometry == _geometry(module) else name
            key = self._key_of[name]
            if key != name:
                return
            self._last.read = weakref.ref(x), _geometry(module), name
            with self._turn(name):
                self.add(name, rows_of(module, x))

        return module.register_forward_pre_hook(hook)

    def add(self, key: str, rows: Tensor) -> None:
        """Adds rows [n, in] to the sum under `key`. Raises ValueError when more come than were given weights."""
        if rows.shape[0] == 0:
            return
        # The model around it may run in 16 bits.
        with torch.autocast(rows.device.type, enabled=False):
            self._add(key, rows.detach().to(torch.float32))

    def _add(self, key: str, rows: Tensor) -> None:
        self._key_of.setdefault(key, key)
        if key not in self._sums:
            self._sums[key] = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
            self._tokens[key], self._mass[key] = 0, 0.0
        first, weights = self._tokens[key], self._weights.get(key)
        self._tokens[key] += rows.shape[0]
        if weights is None:
            self._mass[key] += rows.shape[0]
            self._sums[key] = second_moment(rows, self._sums[key])
            return
        if self._tokens[key] > weights.numel():
            raise ValueError(f"{key} reads more than the {weights.numel()} rows there are weights for")
        part = weights[first : self._tokens[key]].to(rows.device)
        # Read when the moment is finished: a GPU would be waited for at each batch.
        self._mass[key] = self._mass[key] + part.sum(dtype=torch.float64)
        # x sqrt(w) on both sides: the sum is positive semi-definite whatever the rounding.
        self._sums[key] = second_moment(rows * part.sqrt()[:, None], self._sums[key])

    def wants(self, name: str) -> bool:
        """Whether the input of a layer is to be gathered now."""
        return self._wanted(name)

    def pop(self, names: Iterable[str] | None = None) -> dict[str, Moment]:
        """The finished moments of `names` (all when None), by key; their memory is released here."""
        wanted = set(self._key_of if names is None else names)
        out = {}
        for key in [k for k in self._sums if k in wanted]:
            members = tuple(sorted(n for n, k in self._key_of.items() if k == key))
            mass = max(float(self._mass.pop(key)), 1e-30)
            out[key] = Moment(self._sums.pop(key).div_(mass), self._tokens.pop(key), members)
        return out


def outer(left: Tensor, right: Tensor) -> Tensor:
    """left^T right of [n, features] each."""
    return left.T @ right


def begun_mean_outer(
    left: Sequence[Tensor],
    right: Sequence[Tensor],
    weights: Sequence[Tensor] | None = None,
    workers: int = 1,
    difference: bool = False,
    product: Callable[[Tensor, Tensor], Tensor] = outer,
    each: Callable[..., Iterable[tuple[Tensor, float]]] = map,
) -> Callable[[], Tensor]:
    """What waits for sum_t w_t l_t r_t^T / sum_t w_t over the rows of several batches, and gives it back: [left features,
    right features] float32. Where the sums are small and `each` has threads these have begun.

    left, right: by batch, [n, features]; weights: by batch, [n], None for ones. The batches' sums are added in order,
    so that the result does not depend on `workers`. Zero when the weights are. difference: of l - r in place of l, whose
    rounding is relative to the difference; product: what multiplies, unless both are the same rows. workers: batches that
    `each`, a `map`, is given at a time. Raises ValueError without a batch.
    """

    def one(index: int) -> tuple[Tensor, float]:
        x, y = left[index].float(), right[index].float()
        same = left[index] is right[index]
        if difference:
            x = x - y
        if weights is None:
            return second_moment(x) if same else product(x, y), float(x.shape[0])
        w = weights[index].to(x.device, torch.float32)
        # sqrt(w) on both sides: a second moment is positive semi-definite whatever the rounding.
        root = w.sqrt()[:, None]
        left_rows = x * root
        found = second_moment(left_rows) if same else product(left_rows, y * root)
        return found, float(w.sum(dtype=torch.float64))

    if not left:
        raise ValueError("there is no batch to take a moment of")
    # A few at a time: each one's sum takes as much memory as the result. Of small ones more: no core then waits for another.
    width = max(workers, PARTS_BYTES // max(1, 4 * left[0].shape[1] * right[0].shape[1]))
    first = each(one, range(min(width, len(left)))) if width > workers else None

    def finish() -> Tensor:
        total: Tensor | None = None
        mass = 0.0
        for start in range(0, len(left), width):
            end = min(start + width, len(left))
            for part, weight in first if start == 0 and first is not None else each(one, range(start, end)):
                total = part if total is None else total.add_(part)
                mass += weight
        if total is None:
            raise RuntimeError("no sum was made")
        return total.div_(mass) if mass > 0 else total.zero_()

    return finish


def second_moment(rows: Tensor, onto: Tensor | None = None) -> Tensor:
    """rows^T rows [features, features] of [n, features], added to `onto` in place if given.

    On a CPU only the upper half is multiplied out, in strips, and mirrored: at 1536 features 1.6 times faster.
    """
    features = rows.shape[1]
    if rows.device.type != "cpu" or features <= STRIP:
        return rows.T @ rows if onto is None else onto.addmm_(rows.T, rows)
    out = rows.new_zeros(features, features) if onto is None else onto
    for start in range(0, features, STRIP):
        end = min(start + STRIP, features)
        strip = out[:end, start:end]
        strip.addmm_(rows[:, :end].T, rows[:, start:end])
        out[start:end, :start] = strip[:start].T
    return out


def rows_of(module: nn.Module, x: Tensor) -> Tensor:
    """The rows a layer's weight matrix multiplies: [n, in]; convolutions are unfolded (im2col).

    Raises ValueError for grouped convolutions, whose groups see different inputs.
    """
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return x.reshape(-1, x.shape[-1])
    if module.groups != 1:
        raise ValueError(f"a convolution with {module.groups} groups has no single input matrix")
    x = x.detach()
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    padding = module.padding if isinstance(module.padding, tuple) else _same_padding(module)
    pad = [p for size in reversed(padding) for p in (int(size), int(size))]
    x = F.pad(x, pad)
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + axis, d * (k - 1) + 1, s)[..., ::d]
    spatial = len(kernel)
    order = [0, *range(2, 2 + spatial), 1, *range(2 + spatial, 2 + 2 * spatial)]
    rows = x.permute(order).reshape(-1, x.shape[1] * _product(kernel))
    if rows.shape[0] > MAX_CONV_ROWS:
        step = rows.shape[0] / MAX_CONV_ROWS
        rows = rows[(torch.arange(MAX_CONV_ROWS) * step).long()]
    return rows


def _geometry(module: nn.Module) -> tuple[Any, ...]:
    """What decides the rows that a layer makes of its input: two with the same have the same."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return ()
    return module.kernel_size, module.stride, module.dilation, module.padding


def _same_padding(module: Any) -> tuple[int, ...]:
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    return tuple(d * (k - 1) // 2 for k, d in zip(module.kernel_size, module.dilation, strict=True))


def _product(sizes: tuple[int, ...]) -> int:
    out = 1
    for size in sizes:
        out *= size
    return out


def _gated(module: Any, gate_up: Tensor) -> Tensor:
    """What an expert's second product reads, [tokens, ffn], of what its first gives, [tokens, 2 * ffn]."""
    if hasattr(module, "_apply_gate"):  # transformers gives one to most; some have their own, with bounds
        gated: Tensor = module._apply_gate(gate_up)
        return gated
    gate, up = gate_up.chunk(2, dim=-1)
    return module.act_fn(gate) * up  # type: ignore[no-any-return]


class ExpertMoments:
    """Second moments of the inputs of a mixture's expert stacks, pooled over experts, and each expert's tokens.

    Works on modules that hold `gate_up_proj` [experts, 2 * ffn, hidden] and `down_proj` [experts, hidden, ffn]
    and are called as `experts(hidden_states, top_k_index, top_k_weights)` (transformers 5); of others the tokens alone.
    """

    def __init__(self, moments: InputMoments) -> None:
        self._moments = moments
        self.tokens: dict[str, Tensor] = {}

    def watch(self, name: str, module: Any) -> Any:
        """Starts gathering for one expert module; must be attached after the hooks that load its weights."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._moments.wants(name):
                return
            hidden = args[0] if args else kwargs["hidden_states"]
            index = args[1] if len(args) > 1 else kwargs.get("top_k_index")
            hidden = hidden.reshape(-1, hidden.shape[-1])
            gate_up = module.gate_up_proj
            if index is None:
                # Llama 4 gives every expert a row for each token, zeros where it was not chosen, and stores [experts, in,
                # out], as below.
                rows = hidden.reshape(gate_up.shape[0], -1, hidden.shape[-1])
                self.tokens[name] = self.tokens.get(name, 0) + (rows != 0).any(dim=-1).sum(dim=-1)
                return
            counts = torch.bincount(index.reshape(-1).clamp(max=gate_up.shape[0]), minlength=gate_up.shape[0])
            counts = counts[: gate_up.shape[0]]
            self.tokens[name] = self.tokens.get(name, 0) + counts
            for expert in torch.nonzero(counts).reshape(-1).tolist():
                rows = hidden[(index == expert).any(dim=-1)]
                if getattr(module, "is_transposed", False) or gate_up.shape[-1] != rows.shape[-1]:
                    continue  # stored [experts, in, out] (GPT-OSS): the planner treats it as data-free
                self._moments.add(f"{name}.gate_up_proj", rows)
                self._moments.add(f"{name}.down_proj", _gated(module, F.linear(rows, gate_up[expert])))

        return module.register_forward_pre_hook(hook, with_kwargs=True)

"""Random numbers that a model draws in its forward pass, the same ones at each call.

Some models draw them outside of training too: masks of ViTMAE, hashes of Reformer and YOSO, dropout of SpeechT5's prenet.
With torch's default generator the numbers would differ from run to run, and with the order of threads. What functions of
torch for training draw inside of themselves (`gumbel_softmax`) still comes from that.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Functions and methods of torch that take a generator.
_DRAWING = frozenset(
    "rand randn randint randperm normal bernoulli binomial multinomial poisson normal_ uniform_ random_ bernoulli_ "
    "exponential_ cauchy_ geometric_ log_normal_".split()
)
# Those that take none, and what is drawn in their place, of the same shape, type and device.
_LIKE: dict[str, Any] = {"rand_like": torch.rand, "randn_like": torch.randn, "randint_like": torch.randint}
_KEPT = ("dtype", "device")
_INNERMOST = threading.local()


class SameDraws(TorchFunctionMode):
    """Inside, this thread draws from generators that begin anew with each block. drew: whether it has drawn anything, in a
    block inside of this one too."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.drew = False
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._outer: SameDraws | None = None

    def __enter__(self) -> Self:
        self._outer, _INNERMOST.block = getattr(_INNERMOST, "block", None), self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _INNERMOST.block = self._outer
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), dict(kwargs or {})
        if (name in _DRAWING or name in _LIKE) and _device_of(args, given).type == "meta":
            return func(*args, **given)  # nothing is drawn
        if name in _DRAWING:
            if given.get("generator") is None:
                given["generator"] = self._generator(_device_of(args, given))
            return func(*args, **given)
        if name in _LIKE:
            like, *bounds = [given.pop("input")] if "input" in given else args
            bounds += [given.pop(n) for n in ("low", "high") if n in given]
            kind = {n: getattr(like, n) if given.get(n) is None else given[n] for n in _KEPT}
            generator = self._generator(torch.device(kind["device"]))
            return _LIKE[name](*bounds, tuple(like.shape), generator=generator, **kind)
        if func is F.dropout:
            return self._dropped(*args, **given)
        return func(*args, **given)

    def _dropped(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        kept = torch.full_like(input, 1 - p).bernoulli_(generator=self._generator(input.device))
        scaled = kept / (1 - p) if p < 1 else kept
        return input.mul_(scaled) if inplace else input * scaled

    def _generator(self, device: torch.device) -> torch.Generator:
        block: SameDraws | None = self
        while block is not None:
            block.drew, block = True, block._outer
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _device_of(args: Sequence[Any], given: Mapping[str, Any]) -> torch.device:
    """Where a drawing function draws."""
    if given.get("device") is not None:
        return torch.device(given["device"])
    return next((a.device for a in (*args, *given.values()) if isinstance(a, Tensor)), torch.device("cpu"))

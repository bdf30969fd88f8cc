"""What one input costs a model that is no language model: its forward pass, run once, says so.

A language model's work follows from its shapes and the number of tokens. Others multiply a weight at as many places as an
image or a spectrogram leaves there, which only their code knows.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nstf_convert.pipeline.calibrate.batches import prepared, start_gradients
from nstf_convert.pipeline.calibrate.text import REAL_INPUTS, Batch
from nstf_convert.streamed import StreamedModel

# A second pass, without what the first one sets up, is timed where the first took less.
QUICK_SECONDS = 2.0


@dataclass(frozen=True)
class OneInput:
    """seconds: of a forward pass. kept_bytes: of activations that a backward pass to the weights needs. places: where the
    widest use of a weight is made. columns, squares: sums of places times in, and times in^2, over all matrices."""

    seconds: float
    kept_bytes: int
    places: int
    columns: int
    squares: int


def one_input(model: StreamedModel, batch: Batch) -> OneInput:
    """Measures a forward pass of one input. Nothing that a backward pass would need is held in memory."""
    model.settle()
    seconds = _seconds(model, batch)
    if seconds < QUICK_SECONDS:
        seconds = min(seconds, _seconds(model, batch))
    found: list[tuple[int, int]] = []
    kept = Storages()
    for parameter in model.module.parameters():
        kept.leave_out(parameter)

    def before(module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            kept.leave_out(parameter)  # a large one is here only now
        for value in args:
            if isinstance(value, Tensor):
                kept.add(value)  # the gradient of the weight needs it

    def after(columns: int, rows: int) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, args: Any, out: Any) -> None:
            # A router gives a tuple of what it chose: its products are one for each input.
            places = out.numel() // rows if isinstance(out, Tensor) else args[0].numel() // columns
            found.append((places, columns))

        return note

    handles = []
    for _, module, _ in model.linear_modules():
        weight: Any = module.weight
        rows = int(
            getattr(module, "out_channels", 0) or getattr(module, "out_features", 0) or weight.shape[-1]
        )
        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after(math.prod(weight.shape) // rows, rows)))
    for module in model.module.modules():
        if isinstance(module, nn.Embedding):
            handles.append(module.register_forward_hook(start_gradients))
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(kept.add, never):
            model.outputs(**prepared(batch))
    finally:
        for handle in handles:
            handle.remove()
    return OneInput(
        seconds,
        kept.size_bytes,
        max((places for places, _ in found), default=1),
        sum(places * columns for places, columns in found),
        sum(places * columns**2 for places, columns in found),
    )


class Storages:
    """Adds up the bytes of tensors, each storage once. They may be freed meanwhile: a weak reference keeps a storage's
    place from being taken by another one, as an address would not."""

    def __init__(self) -> None:
        self._seen: dict[StorageWeakRef, int] = {}

    @property
    def size_bytes(self) -> int:
        """Of all."""
        return sum(self._seen.values())

    def leave_out(self, tensor: Tensor) -> None:
        """Does not count this tensor: a weight, which is there anyway."""
        if not tensor.is_meta:
            self._seen[StorageWeakRef(tensor.untyped_storage())] = 0  # type: ignore[no-untyped-call]

    def add(self, tensor: Tensor) -> None:
        """Counts a tensor. As what autograd packs with, it keeps nothing."""
        storage = tensor.untyped_storage()
        self._seen.setdefault(StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]


def never(packed: None) -> Tensor:
    """Unpacks what was counted only. Raises RuntimeError."""
    raise RuntimeError("the activations were counted and not kept: there is no backward pass")


@torch.no_grad()
def _seconds(model: StreamedModel, batch: Batch) -> float:
    start = time.perf_counter()
    out = model.try_outputs(REAL_INPUTS, **batch)
    if out.device.type == "cuda":
        torch.cuda.synchronize(out.device)
    return time.perf_counter() - start

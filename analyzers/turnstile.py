"""Runs several batches through a model layer by layer: every batch finishes layer l before any enters l + 1.

Each batch runs the model's own forward in its own thread; a gate before every layer lets one thread through at
a time. So a whole calibration set streams through one layer while its weights and its Hessians are in memory,
and nothing has to be known about what a layer takes as arguments (masks, rotary tables, caches differ by
architecture).
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class _Cancelled(BaseException):
    """Raised inside a waiting batch when another batch failed."""


class _Batch:
    def __init__(self, run: Callable[[], Any]) -> None:
        self.go = threading.Semaphore(0)
        self.stopped = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.cancelled = False
        self.done = False
        self.thread = threading.Thread(target=self._main, args=(run,), daemon=True)

    def _main(self, run: Callable[[], Any]) -> None:
        self.go.acquire()
        try:
            if not self.cancelled:
                with torch.no_grad():
                    run()
        except _Cancelled:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self.stopped.release()

    def resume(self) -> None:
        """Lets the batch run up to the next gate (or its end) and waits for it."""
        self.go.release()
        self.stopped.acquire()
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Called by the batch's own thread at a gate."""
        self.stopped.release()
        self.go.acquire()
        if self.cancelled:
            raise _Cancelled


def run_layer_by_layer(
    layers: Sequence[nn.Module],
    runs: Sequence[Callable[[], Any]],
    after_layer: Callable[[int], None],
) -> None:
    """Runs every batch in `runs` through the layers in step; `after_layer(l)` when all have left layer l.

    `after_layer(-1)` is called when all batches stand before the first layer, and
    `after_layer(len(layers) - 1)` when all have finished. Errors of a batch are raised here.
    Raises ValueError when a batch calls a layer more than once (see `calls_per_layer`).
    """
    _share_one_arena()
    batches = [_Batch(run) for run in runs]
    by_thread = {batch.thread: batch for batch in batches}

    def gate(*_: Any) -> None:
        batch = by_thread.get(threading.current_thread())  # type: ignore[arg-type]
        if batch is not None:
            batch.wait()

    # prepend: the gate must stand before the hooks that load the layer's weights.
    handles = [layer.register_forward_pre_hook(gate, prepend=True) for layer in layers]
    try:
        for batch in batches:
            batch.thread.start()
        for step in range(len(layers) + 1):
            for batch in batches:
                if not batch.done:
                    batch.resume()
            after_layer(step - 1)
        if not all(batch.done for batch in batches):
            raise ValueError("a layer is called more than once: run the batches without the turnstile")
    finally:
        for handle in handles:
            handle.remove()
        for batch in batches:
            if not batch.done:
                batch.cancelled = True
                batch.go.release()
        for batch in batches:
            if batch.thread.is_alive():
                batch.thread.join()


class _Enough(Exception):
    """Ends the counting run: the answer is known."""


def calls_per_layer(layers: Sequence[nn.Module], run: Callable[[], Any]) -> list[int]:
    """How often one forward pass `run` calls each layer; it stops at the first second call of a layer."""
    counts = dict.fromkeys(layers, 0)

    def count(layer: nn.Module, args: Any) -> None:
        counts[layer] += 1
        if counts[layer] > 1:
            raise _Enough

    handles = [layer.register_forward_pre_hook(count, prepend=True) for layer in counts]
    try:
        with torch.no_grad():
            run()
    except _Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return list(counts.values())


def _share_one_arena() -> None:
    """Keeps glibc from giving every batch's thread a heap of its own, each of which keeps what was freed in it.

    With 16 batches of a 135 M model that was 1 GiB. Only one batch runs at a time, so one heap serves all.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(-8, 1)  # M_ARENA_MAX


def layer_list(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The path and the members of the model's main stack of layers: the ModuleList with most parameters."""
    best: tuple[int, str, list[nn.Module]] = (0, "", [])
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            size = sum(p.numel() for p in module.parameters())
            if size > best[0]:
                best = (size, path, list(module))
    return best[1], best[2]

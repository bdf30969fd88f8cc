"""Runs several batches through a model in step: all of them arrive at a gate before any of them passes it.

Each batch runs the model's own forward in its own thread and waits before every gated module. So a whole
calibration set streams through one layer, or one weight, while that and its Hessian are in memory, and nothing has
to be known about what a layer takes as arguments (masks, rotary tables, caches differ by architecture).
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from nstf.analyzers.heap import MAPPED_BYTES_WAITING, give_back_much, share_one_arena


class _Cancelled(BaseException):
    """Raised inside a waiting batch when another batch failed."""


class _Batch:
    """One batch: the gate it stands at (`at`), the positional arguments of that module, and its result at the end. then: is
    called by the batch's own thread when it stops."""

    def __init__(self, run: Callable[[], Any], stopped: "queue.SimpleQueue[_Batch]") -> None:
        self.go = threading.Semaphore(0)
        self.stopped = stopped
        self.at = -1
        self.inputs: tuple[Any, ...] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.done = False
        self.then: Callable[[_Batch], None] = lambda batch: None
        self.thread = threading.Thread(target=self._main, args=(run,), daemon=True)

    def _main(self, run: Callable[[], Any]) -> None:
        self.go.acquire()
        try:
            if not self.cancelled:
                with torch.no_grad():
                    self.result = run()
        except _Cancelled:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._stop()

    def _stop(self) -> None:
        # By this thread: until another had noticed, a core would stand still.
        self.then(self)
        self.stopped.put(self)

    def wait(self, gate: int, inputs: tuple[Any, ...]) -> None:
        """Called by the batch's own thread at a gate."""
        self.at, self.inputs = gate, inputs
        self._stop()
        self.go.acquire()
        self.inputs = None
        if self.cancelled:
            raise _Cancelled


def run_in_step(
    gates: Sequence[Sequence[nn.Module]],
    runs: Sequence[Callable[[], Any]],
    at_gate: Callable[[int, list[Any]], Callable[[], None] | None],
    workers: int = 1,
    repeats: bool = True,
    ahead: Collection[int] = (),
) -> None:
    """Runs every batch in `runs` up to each gate in turn; `at_gate(g, inputs)` when all stand before gate g.

    gates: the modules each gate stands before, in the order in which they run; one gate may stand before several
    modules, of two models for instance. inputs: by batch, the arguments its module was called with, None for a batch
    that did not come by. `at_gate(len(gates), results)` is called at the end, with what the runs gave back. workers:
    batches that run at a time; the modules must then bear it. repeats: a module that is called again is let through;
    otherwise that is a ValueError. ahead: the places of runs that what is done at a gate does not concern. What `at_gate`
    gives back is called while these go on to the next gate, one at a time until it is done (with one worker: after it); the
    others wait for it. Errors of a batch are raised here.
    """
    share_one_arena(MAPPED_BYTES_WAITING)
    stopped: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
    batches = [_Batch(run, stopped) for run in runs]
    by_thread = {batch.thread: batch for batch in batches}
    early = [batches[i] for i in sorted(ahead)]

    def gate(index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            batch = by_thread.get(threading.current_thread())  # type: ignore[arg-type]
            if batch is None:
                return
            if index > batch.at:
                batch.wait(index, args)
            elif not repeats:
                raise ValueError("a layer is called more than once: run the batches without the turnstile")

        return hook

    # prepend: the gate must stand before the hooks that load the module's weights.
    handles = [
        module.register_forward_pre_hook(gate(index), prepend=True)
        for index, modules in enumerate(gates)
        for module in modules
    ]
    try:
        for batch in batches:
            batch.thread.start()
        rest: Callable[[], None] | None = None
        for step in range(len(gates) + 1):
            behind = [b for b in batches if not b.done and b.at < step]
            if rest is None:
                _resume(behind, stopped, workers)
            else:
                first = [b for b in early if not b.done and b.at < step]
                _beside(rest, first, [b for b in behind if b not in first], stopped, workers)
            give_back_much(unknown=True)
            if step < len(gates):
                rest = at_gate(step, [b.inputs if b.at == step and not b.done else None for b in batches])
            else:
                rest = at_gate(step, [b.result for b in batches])
        if rest is not None:
            rest()
    finally:
        share_one_arena()
        for handle in handles:
            handle.remove()
        for batch in batches:
            if not batch.done:
                batch.cancelled = True
                batch.go.release()
        for batch in batches:
            if batch.thread.is_alive():
                batch.thread.join()


class _Round:
    """Batches on their way to their next gate, a few at a time. A batch that stops lets the next one go itself."""

    def __init__(self, stopped: "queue.SimpleQueue[_Batch]", workers: int) -> None:
        self._stopped, self._workers = stopped, workers
        self._waiting: deque[_Batch] = deque()
        self._lock = threading.Lock()
        self._begun = self._running = 0

    def more(self, batches: Iterable[_Batch], workers: int | None = None) -> None:
        """Further batches; workers: how many run at a time from now on."""
        with self._lock:
            self._workers = workers or self._workers
            self._waiting.extend(batches)
            self._fill()

    def _fill(self) -> None:
        while self._waiting and self._running < self._workers:
            batch = self._waiting.popleft()
            batch.then = self._next
            self._begun, self._running = self._begun + 1, self._running + 1
            batch.go.release()

    def _next(self, batch: _Batch) -> None:
        with self._lock:
            self._running -= 1
            if batch.error is not None:
                self._waiting.clear()
            self._fill()

    def drop(self) -> None:
        """Batches that have not begun stay where they are."""
        with self._lock:
            self._waiting.clear()

    def wait(self) -> None:
        """Returns when all have stopped. Raises the first error of a batch."""
        errors: list[BaseException | None] = []
        while len(errors) < self._begun:  # grows before the one that makes it grow is told
            errors.append(self._stopped.get().error)
        for error in errors:
            if error is not None:
                raise error


def _resume(batches: Iterable[_Batch], stopped: "queue.SimpleQueue[_Batch]", workers: int) -> None:
    """Lets each batch run up to its next gate (or its end), `workers` of them at a time, and waits for all."""
    batches_run = _Round(stopped, workers)
    batches_run.more(batches)
    batches_run.wait()


def _beside(
    work: Callable[[], None],
    early: Sequence[_Batch],
    others: Sequence[_Batch],
    stopped: "queue.SimpleQueue[_Batch]",
    workers: int,
) -> None:
    """Does some work while the batches `early` run up to their next gate, one at a time, and then all that are left.
    Raises the errors of both; those of the work wait for one batch at most."""
    if workers == 1 or not early:
        work()
        _resume([*early, *others], stopped, workers)
        return
    batches = _Round(stopped, 1)
    batches.more(early)
    try:
        work()
    except BaseException:
        batches.drop()
        with suppress(BaseException):  # the work's own error counts
            batches.wait()
        raise
    batches.more(others, workers)
    batches.wait()


def run_layer_by_layer(
    layers: Sequence[nn.Module],
    runs: Sequence[Callable[[], Any]],
    after_layer: Callable[[int], None],
    workers: int = 1,
) -> None:
    """Runs every batch in `runs` through the layers in step; `after_layer(l)` when all have left layer l.

    `after_layer(-1)` is called when all batches stand before the first layer, and
    `after_layer(len(layers) - 1)` when all have finished. workers: batches that run at a time. Errors of a batch are raised
    here.
    Raises ValueError when a batch calls a layer more than once (see `calls_per_layer`).
    """
    gates = [[layer] for layer in layers]

    def at_gate(gate: int, inputs: list[Any]) -> None:
        after_layer(gate - 1)

    run_in_step(gates, runs, at_gate, workers, repeats=False)


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


def call_order(modules: Iterable[nn.Module], run: Callable[[], Any]) -> list[nn.Module]:
    """The calls of `modules` during `run`, in order: a module that is called twice is there twice."""
    calls: list[nn.Module] = []
    handles = [m.register_forward_pre_hook(lambda m, args: calls.append(m)) for m in modules]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def layer_list(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The path and the members of the model's main stack of layers: the ModuleList with most parameters."""
    best: tuple[int, str, list[nn.Module]] = (0, "", [])
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            size = sum(p.numel() for p in module.parameters())
            if size > best[0]:
                best = (size, path, list(module))
    return best[1], best[2]

"""Work on a GPU that must not wait for Python: jobs side by side, and steps that are captured once and replayed.

On a CPU both simply run what they are given.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

# Streams of jobs beside the current one; further jobs wait in them.
MOST_STREAMS = 7

T = TypeVar("T")
Step = Callable[..., tuple[Tensor, ...]]


def side_by_side(jobs: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """The results of jobs that do not depend on each other; on a GPU each runs in a stream of its own."""
    if device.type != "cuda" or len(jobs) < 2:
        return [job() for job in jobs]
    current = torch.cuda.current_stream(device)
    ready = current.record_event()
    streams = _streams(device.index or 0)[: len(jobs) - 1]
    for stream in streams:
        stream.wait_event(ready)
    try:
        results = [jobs[0]()]
        for i, job in enumerate(jobs[1:]):
            with torch.cuda.stream(streams[i % len(streams)]):
                results.append(job())
    finally:
        # After a failure too: a capture cannot end before all streams have come back.
        for stream in streams:
            current.wait_stream(stream)
    return results


def in_turn(jobs: Sequence[Iterator[None]], device: torch.device) -> None:
    """Runs jobs that do not depend on each other to their ends; on a GPU each in a stream of its own, a step each in turn.

    A stream takes about a thousand launches before the next one waits: of jobs of more than that the second would begin when
    the first has nearly ended. Steps may not wait for the device. What jobs hand on must be made before or held after this.
    """
    if device.type != "cuda" or len(jobs) < 2:
        for job in jobs:
            for _ in job:
                pass
        return
    current = torch.cuda.current_stream(device)
    ready = current.record_event()
    streams = _streams(device.index or 0)[: len(jobs)]
    for stream in streams:
        stream.wait_event(ready)
    left = [(job, streams[i % len(streams)]) for i, job in enumerate(jobs)]
    try:
        while left:
            going = []
            for job, stream in left:
                with torch.cuda.stream(stream):
                    if next(job, job) is not job:
                        going.append((job, stream))
            left = going
    finally:
        for stream in streams:
            current.wait_stream(stream)


class Replayed:
    """A step that is called many times with tensors of the same shapes.

    On a GPU its second call is captured in a graph and later ones replay it: a launch instead of hundreds. What it gives
    back then holds until the next call. The step may not wait for the device. Calls of other shapes are not captured.
    """

    def __init__(self, step: Step, calls: int) -> None:
        """calls: how many there will be; a few are not worth a graph."""
        self._step = step
        self._worth = calls >= 4
        self._shapes: list[torch.Size] | None = None
        self._graph: _Graph | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not self._worth or not inputs[0].is_cuda:
            return self._step(*inputs)
        shapes = [x.shape for x in inputs]
        if shapes != self._shapes:
            self._shapes = self._shapes or shapes
            return self._step(*inputs)
        if self._graph is None:
            try:
                self._graph = _Graph(self._step, inputs)
            except torch.OutOfMemoryError:
                self._worth = False
                return self._step(*inputs)
        return self._graph(*inputs)


# By device: graphs share a pool of memory, which lives as long as one of them does.
_last: dict[int, torch.cuda.CUDAGraph] = {}
_capturing = threading.Lock()


class _Graph:
    """A captured step and the tensors that it reads and writes."""

    def __init__(self, step: Step, inputs: Sequence[Tensor]) -> None:
        device = inputs[0].device
        index = device.index or 0
        self.inputs = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
        self.graph = torch.cuda.CUDAGraph()
        current, stream = torch.cuda.current_stream(device), _streams(index, "capture")[0]
        with _capturing:
            pool = _last[index].pool() if index in _last else None
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                # Other threads may go on using the device.
                self.graph.capture_begin(pool, "thread_local")
                try:
                    self.outputs = step(*self.inputs)
                except BaseException:
                    # What went wrong is worth more than that the capture is of no use.
                    with suppress(RuntimeError):
                        self.graph.capture_end()
                    raise
                self.graph.capture_end()
            current.wait_stream(stream)
            _last[index] = self.graph

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.outputs


@cache
def _streams(index: int, purpose: str = "jobs") -> list[torch.cuda.Stream]:
    """Always the same ones: each keeps memory that was freed in it, and a workspace for matrix products."""
    count = MOST_STREAMS if purpose == "jobs" else 1
    return [torch.cuda.Stream(index) for _ in range(count)]  # type: ignore[no-untyped-call]

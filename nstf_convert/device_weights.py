"""Weights on the device that computes, as a streamed model asks for them.

The most recently used ones stay within a budget of bytes: a small model stays as a whole, of a large one as many layers as
fit. On a GPU the next weights are read and copied by a thread and a stream of their own while the current ones are in use.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

# Share of the budget that may be weights read ahead.
AHEAD_SHARE = 0.25


class DeviceWeights:
    """name -> the weight on `device`, in the dtype of its source.

    order: names in the order in which they are usually asked for; what comes after a name is read ahead.
    """

    def __init__(
        self,
        source: Callable[[str], Tensor],
        device: torch.device,
        budget_bytes: int,
        order: Sequence[str] = (),
    ) -> None:
        self._source, self._device, self._budget = source, device, budget_bytes
        self._order = list(dict.fromkeys(order))
        self._position = {name: i for i, name in enumerate(self._order)}
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._pending: dict[str, Future[Tensor]] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and self._order:
            self._pool = ThreadPoolExecutor(1, "read-ahead")
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, name: str) -> Tensor:
        """The weight. It must not be written to."""
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
            pending = self._pending.pop(name, None)
        if found is None:
            found = pending.result() if pending is not None else self._read(name)
            self._keep(name, found)
        if self._stream is not None:
            # Memory of the copying stream must not be used again before the computing one is done with it.
            found.record_stream(torch.cuda.current_stream(self._device))
            self._read_ahead(name)
        return found

    def drop(self, name: str) -> None:
        """Forgets a weight whose source gives another one from now on."""
        with self._lock:
            pending = self._pending.pop(name, None)
            found = self._kept.pop(name, None)
            if found is not None:
                self._bytes -= found.numel() * found.element_size()
        if pending is not None:
            pending.cancel()

    def clear(self) -> None:
        """Forgets everything."""
        for name in [*self._kept, *self._pending]:
            self.drop(name)

    def _read(self, name: str) -> Tensor:
        value = self._source(name)
        return value if value.device == self._device else value.to(self._device)

    def _keep(self, name: str, value: Tensor) -> None:
        size = value.numel() * value.element_size()
        with self._lock:
            if name in self._kept or size > self._budget:
                return
            self._kept[name] = value
            self._bytes += size
            while self._bytes > self._budget:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.numel() * oldest.element_size()

    def _read_ahead(self, name: str) -> None:
        at = self._position.get(name)
        if at is None or self._pool is None:
            return
        with self._lock:
            ahead = 0
            for following in self._order[at + 1 :]:
                if following in self._kept or following in self._pending:
                    continue
                # Sizes ahead are like those behind.
                size = max((t.numel() * t.element_size() for t in self._kept.values()), default=0)
                ahead += size
                if ahead > AHEAD_SHARE * self._budget or len(self._pending) >= 8:
                    break
                self._pending[following] = self._pool.submit(self._copy, following)

    def _copy(self, name: str) -> Tensor:
        with torch.cuda.stream(self._stream):
            value = self._read(name)
        if self._stream is not None:
            self._stream.synchronize()
        return value

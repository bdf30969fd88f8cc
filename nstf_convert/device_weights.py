"""Weights on the device that computes, as a streamed model asks for them.

The most recently used ones stay within a budget of bytes: a small model stays as a whole, of a large one as many layers as
fit. On a GPU the next weights are read and copied by a thread and a stream of their own while the current ones are in use.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from nstf_convert.checkpoint import memory

# Share of the budget that may be weights read ahead.
AHEAD_SHARE = 0.25
AHEAD_LAYERS = 8


class DeviceWeights:
    """name -> the weight on `device`, in the dtype of its source."""

    def __init__(self, source: Callable[[str], Tensor], device: torch.device, budget_bytes: int) -> None:
        self._source, self._device, self._budget = source, device, budget_bytes
        self._order: list[str] = []
        self._layers: list[list[str]] = []
        self._layer_of: dict[str, int] = {}
        self._last: str | None = None
        self._backwards = False
        self._position: dict[str, int] = {}
        self._elements: Mapping[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._element_bytes = 0
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._pending: dict[str, Future[Tensor]] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def read_ahead(self, elements: Mapping[str, int]) -> None:
        """From now on, what comes after a name is read on a GPU while that is in use. elements: how many each weight has, in
        the order of their use.

        Layers may be gone through backwards, as gradients do: what comes next is then the layer before.
        """
        self._elements = elements
        self._order = list(elements)
        self._position = {name: i for i, name in enumerate(self._order)}
        layers: dict[str, list[str]] = {}
        for name in self._order:
            layers.setdefault(_layer(name), []).append(name)
        self._layers = list(layers.values())
        self._layer_of = {name: i for i, names in enumerate(self._layers) for name in names}
        if self._stream is not None and self._budget > 0:
            self._pool = ThreadPoolExecutor(1, "read-ahead")

    def __call__(self, name: str) -> Tensor:
        """The weight. It must not be written to."""
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
            pending = self._pending.pop(name, None)
        if found is None:
            found = self._arrived(pending) if pending is not None else None
            if found is None:
                found = self._read(name)
            self._keep(name, found)
        if self._stream is not None:
            # Memory of the copying stream must not be used again before the computing one is done with it.
            found.record_stream(torch.cuda.current_stream(self._device))
            self._read_ahead(name)
        return found

    def kept(self, name: str) -> Tensor | None:
        """The weight if it is on the device already."""
        with self._lock:
            return self._kept.get(name)

    def drop(self, name: str) -> None:
        """Forgets a weight whose source gives another one from now on."""
        with self._lock:
            pending = self._pending.pop(name, None)
            found = self._kept.pop(name, None)
            if found is not None:
                self._bytes -= found.numel() * found.element_size()
        if pending is not None:
            pending.cancel()

    def _arrived(self, pending: Future[Tensor]) -> Tensor | None:
        """What was read ahead; None where there was no memory for it at that moment."""
        try:
            return pending.result()
        except torch.OutOfMemoryError:
            return None

    def clear(self) -> None:
        """Forgets all of them: the model is done, whoever still refers to it."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _read(self, name: str) -> Tensor:
        if self._device.type != "cuda":
            return memory.to_device(self._source(name), self._device)
        with memory.for_gpu(self._device):
            return memory.to_device(self._source(name), self._device)

    def _keep(self, name: str, value: Tensor) -> None:
        size = value.numel() * value.element_size()
        with self._lock:
            self._sizes[name] = size
            self._element_bytes = max(self._element_bytes, value.element_size())
            if name in self._kept or size > self._budget:
                return
            self._kept[name] = value
            self._bytes += size
            while self._bytes > self._budget:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.numel() * oldest.element_size()

    def _read_ahead(self, name: str) -> None:
        if name not in self._position or self._pool is None:
            return
        with self._lock:
            coming = self._coming(name)
            for other in [n for n in self._pending if n not in coming]:
                self._pending.pop(other).cancel()
            ahead = 0
            for following in coming:
                if following in self._kept:
                    continue
                # One that was not read yet is taken to be of the widest type so far.
                ahead += self._sizes.get(following, self._elements[following] * self._element_bytes)
                if ahead > AHEAD_SHARE * self._budget:
                    break
                if following not in self._pending:
                    self._pending[following] = self._pool.submit(self._copy, following)

    def _coming(self, name: str) -> list[str]:
        """What follows a weight: the rest of its layer, and the layers after it or, on a way back, before it."""
        at, before = self._layer_of[name], self._last
        self._last = name
        if before is not None and at != self._layer_of[before]:
            self._backwards = 0 < at < self._layer_of[before]
        elif before is not None and self._position[name] < self._position[before]:
            self._backwards = at > 0  # a layer again: it is computed once more for its gradients
        rest = [n for n in self._layers[at] if self._position[n] > self._position[name]]
        if self._backwards:
            following = self._layers[max(0, at - AHEAD_LAYERS) : at][::-1]
        else:
            following = self._layers[at + 1 : at + 1 + AHEAD_LAYERS]
        return [*rest, *(n for layer in following for n in layer)]

    def _copy(self, name: str) -> Tensor:
        with torch.cuda.stream(self._stream):
            value = self._read(name)
        if self._stream is not None:
            self._stream.synchronize()
        return value


def _layer(name: str) -> str:
    """What the names of a layer begin with: `model.layers.3`; the name itself outside the layers."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return name if number is None else ".".join(parts[: number + 1])

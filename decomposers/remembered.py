"""What one decomposition of a tensor finds out that the next one of it needs again.

Ranks are adapted in steps, and every step starts from the same spectra: the tensor in the coordinates of its norm, the
eigenvectors of its unfoldings, the root of its inputs' second moment.
"""

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Derived(Protocol):
    """(key, make) -> what `make` gives, made once per key (`Stats.derived`)."""

    def __call__(self, key: Hashable, make: Callable[[], T], /) -> T: ...


class Remembered:
    """Of one tensor and its statistics. Of every kind only the last result is kept: views and their norms are as large as
    the tensor, in float64."""

    def __init__(self, weight: Tensor | None = None, derived: Derived | None = None) -> None:
        """derived: keeps what follows from the Hessian alone, which tensors of the same inputs share."""
        self._weight, self._derived = weight, derived
        self._last: dict[str, tuple[Hashable, Any]] = {}

    def of_tensor(self, weight: Tensor, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives for `weight`; not kept where that is another tensor than this one."""
        if weight is not self._weight:
            return make()
        if kind not in self._last or self._last[kind][0] != key:
            self._last.pop(kind, None)
            self._last[kind] = key, make()
        return self._last[kind][1]  # type: ignore[no-any-return]

    def of_inputs(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives for the Hessian."""
        return make() if self._derived is None else self._derived(("decomposers", key), make)


FORGETFUL = Remembered()
"""Makes everything anew."""

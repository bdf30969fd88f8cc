"""What is derived from an encoded tensor once and used at every call, kept as long as the tensor lives."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable
    from typing import TypeVar

    from nstf.kernels.formats.tree import EncodedTensor

    T = TypeVar("T")


def per_encoded(function: Callable[[EncodedTensor], T]) -> Callable[[EncodedTensor], T]:
    """`function` with one remembered result per EncodedTensor object (by identity; forgotten with the
    object).

    An EncodedTensor holds a mapping and so has no hash; its arrays are never written after it was made.
    """
    known: dict[int, tuple[weakref.ref[EncodedTensor], T]] = {}

    def remembered(encoded: EncodedTensor) -> T:
        key = id(encoded)
        entry = known.get(key)
        if entry is not None and entry[0]() is encoded:
            return entry[1]
        import weakref

        result = function(encoded)
        known[key] = (weakref.ref(encoded, lambda _: known.pop(key, None)), result)
        return result

    return remembered

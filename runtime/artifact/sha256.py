"""SHA-256 of arrays by whatever is quickest here: `ext.sha256`, which takes sixteen at a time (kernels/cpu/sha256.cpp), or
hashlib.

hashlib is imported when it is needed: that takes 3 ms, most of them for OpenSSL.
"""

from __future__ import annotations

from nstf.kernels.cpu import AVAILABLE, ext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Fewer arrays are not faster together; so few bytes take less time than importing hashlib.
LEAST_TOGETHER, FEW_BYTES = 8, 1 << 19


def together() -> bool:
    """Whether several arrays are faster together than one after the other."""
    return AVAILABLE and ext.sha256_available()


def sha256(arrays: Sequence[memoryview]) -> list[bytes]:
    """The digest of each array of bytes. Other threads run meanwhile where arrays are large."""
    if together() and (len(arrays) >= LEAST_TOGETHER or sum(a.nbytes for a in arrays) <= FEW_BYTES):
        found = ext.sha256(arrays)
        return [found[at : at + 32] for at in range(0, len(found), 32)]
    import hashlib

    return [hashlib.sha256(array).digest() for array in arrays]

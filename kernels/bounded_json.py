"""JSON that a file brings to the kernels: measured tiles, headers of compiled ones."""

import json
from typing import Any

# Values that a text may have in any case, and bytes for each one more: empty lists take fifty times their bytes of memory.
ALWAYS_VALUES, BYTES_A_VALUE = 1 << 19, 16


def bounded_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for one of values that would take far more memory than it does."""
    if sum(map(text.count, ",[{")) > ALWAYS_VALUES + len(text) // BYTES_A_VALUE:
        raise ValueError("too many values for its length")
    return json.loads(text)

"""JSON of a checkpoint's side files: duplicate keys and runaway nesting refused."""

import json
from typing import Any

from nstf.errors import CorruptError


def load_json(data: bytes, what: str) -> Any:
    """The value of a JSON text.

    Raises CorruptError naming `what`; Infinity is allowed (Mamba 2's configs hold it).
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise CorruptError(f"{what} has the key {key[:80]!r} twice; download it again")
            result[key] = value
        return result

    try:
        return json.loads(data, object_pairs_hook=unique)
    except CorruptError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what} is not valid JSON ({str(error)[:100]}); download it again") from error

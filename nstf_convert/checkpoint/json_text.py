"""JSON of a checkpoint's side files: duplicate keys, runaway nesting and more values than text refused."""

import json
from typing import Any

from nstf.errors import CorruptError
from nstf.runtime.artifact.header import HeaderError, check_values


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
        check_values(data, what)
        return json.loads(data, object_pairs_hook=unique)
    except CorruptError:
        raise
    except HeaderError as error:
        raise CorruptError(f"{error}; download it again") from error
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what} is not valid JSON ({str(error)[:100]}); download it again") from error

"""The config of a model inside an artifact: its JSON, and its numbers against the tensors that the file holds.

transformers builds what a config says before anybody looks at the tensors: `num_labels` of 2^64 becomes a dictionary of
labels, `num_hidden_layers` of 10^6 a million layers. So each number that something is made from must be one that the
file's tensors can answer, and is checked before transformers sees it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping

from nstf.errors import CorruptError
from nstf.kernels.formats.tree import stored_bytes
from nstf.kernels.records import changed, frozen
from nstf.runtime.artifact.header import HeaderError, check_nesting, check_values, corrupt, short
from nstf.runtime.artifact.manifest import Manifest, TensorRecord

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Config = Mapping[str, Any]


MAX_BYTES = 16 << 20
MAX_DEPTH = 16
MAX_ITEMS = 200_000
MAX_LABELS = 65_536
# Letters of a text: some name a layer with each.
MAX_TEXT = 65_536
# Values of a list, or as many as there are tensors; lists under keys of these words may be longer.
MAX_LIST = 4_096
_LONG = {"label", "labels", "class", "classes", "token", "tokens"}
# Positions, windows, sizes of chunks; and whatever else a number may mean.
MAX_INTEGER, MAX_NUMBER = 1 << 31, 1e300
# What small models state beyond the sizes of their tensors: heads of a group, classes, buckets, positions of an image.
LEAST_SIZE, LEAST_COUNT = 65_536, 1_024
# Elements of a buffer that a model computes for itself: a mask over its positions, a table of angles.
LEAST_BUFFER = 1 << 24
# Of a tensor that count for that, for each byte it is stored in.
ELEMENTS_A_BYTE = 1 << 8
# Of one that it makes number by number in Python, a microsecond and 40 bytes each, or from such matrices of numpy's.
LEAST_TABLE = 1 << 20

# Words of a key that says how often something is made, and how large something is.
_COUNTS = frozenset(
    "layer layers block blocks depth depths stage stages experts heads head repeats labels levels points quantizers replace "
    "cycles".split()
)
_SIZES = frozenset(
    "size sizes dim dims dimension dimensions hidden channels width widths rank ranks group groups mlp ffn inner "
    "embd embed embeddings intermediate vocab queries buckets state states types codebooks kernel kernels features ratio "
    "latents bins".split()
)
# Counts of what nothing is made of.
_FREE = frozenset(
    "position positions length lengths window ctx context theta token tokens id ids seq sequence pixels frames bos eos pad "
    "period rate frequency chunk params parameters".split()
)
_LABELS = ("id2label", "label2id")
# How keys of tokens end.
_TOKENS = ("_token_id", "_token_ids", "_tokens_id", "_tokens_ids")
# The least that may stand where transformers (5.17) makes a range of it in the middle of a text; -1 is a window that is off.
_LEAST = {"num_hidden_layers": 0, "attention_chunk_size": 0, "sliding_window": -1}
# What transformers looks for in the config of any model, whether its class declares (and so checks) it or not.
_TYPES: dict[str, tuple[type, str]] = {
    "sliding_window": (int, "a whole number"),
    "attention_chunk_size": (int, "a whole number"),
    "is_causal": (bool, "true or false"),
    "output_hidden_states": (bool, "true or false"),
    "kv_sharing_modes": (list, "a list"),
}


@frozen
class Limits:
    """What the model of a file may be made of. tensors: their number, other names included; dimension: the largest of any
    tensor; elements: of all tensors together, decoded."""

    tensors: int
    dimension: int
    elements: int

    @property
    def count(self) -> int:
        """Of layers, experts, heads: each has a tensor or a row of one."""
        return max(LEAST_COUNT, self.tensors, self.dimension)

    @property
    def parameters(self) -> int:
        """Parameters that a constructor may make, those included that it makes and then replaces by tied ones."""
        return 4 * self.tensors + LEAST_COUNT

    @property
    def size(self) -> int:
        """Of one dimension of a parameter or of what makes one."""
        return max(LEAST_SIZE, 8 * self.dimension)

    @property
    def buffer_elements(self) -> int:
        """Elements of any tensor that a constructor may fill."""
        return max(LEAST_BUFFER, self.elements)

    @property
    def table_elements(self) -> int:
        """Elements of tables that a constructor makes by numpy."""
        return max(LEAST_TABLE, self.elements)


def limits_of(manifest: Manifest) -> Limits:
    """What the tensors of a manifest allow."""
    records = [record for record in manifest.tensors.values() if isinstance(record, TensorRecord)]
    # A decomposition of a kilobyte may state 2^40 elements, which bear nothing out.
    elements = (min(math.prod(r.shape), ELEMENTS_A_BYTE * stored_bytes(r.tree, r.shape)) for r in records)
    found = limits_of_shapes([r.shape for r in records], len(manifest.tensors))
    return changed(found, elements=sum(elements))


def limits_of_shapes(shapes: Collection[tuple[int, ...]], tensors: int | None = None) -> Limits:
    """What tensors of these shapes allow. tensors: their number, where some have other names besides."""
    return Limits(
        len(shapes) if tensors is None else tensors,
        max((size for shape in shapes for size in shape), default=1),
        sum(math.prod(shape) for shape in shapes),
    )


def parse_object(raw: bytes, where: object, name: str) -> dict[str, Any]:
    """The object of a JSON file inside an artifact. Raises CorruptError.

    Infinity and NaN are allowed: Mamba 2's configs hold them.
    """
    if len(raw) > MAX_BYTES:
        raise corrupt(where, f"its {name} has {len(raw)} bytes, above {MAX_BYTES}")
    try:
        check_nesting(raw, f"its {name} is not JSON: it")
        check_values(raw, f"its {name}")
        # As text: json.loads would take bytes for UTF-16 where they look so, whose brackets are not those counted above.
        found = json.loads(raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    except HeaderError as error:
        raise corrupt(where, error) from error
    except (ValueError, RecursionError) as error:
        raise corrupt(where, f"its {name} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise corrupt(where, f"its {name} is not an object")
    return found


def check_config(config: Config, limits: Limits, where: object) -> None:
    """Raises CorruptError for a config that says more than the tensors of its file can be."""
    _check(config, limits, where, "", 0, [0])


def _check(value: Any, limits: Limits, where: object, path: str, depth: int, seen: list[int]) -> None:
    seen[0] += 1
    if depth > MAX_DEPTH or seen[0] > MAX_ITEMS:
        raise CorruptError(f"{where}: its config.json is nested too deeply or has too many entries")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_text(key, where, f"a key of {path or 'it'}")
            if key in _LABELS:
                _check_labels(item, where, key)
            else:
                if key == "attention_types":
                    _check_types_of_layers(item, limits, where)
                _check_type(item, where, key)
                _check(item, limits, where, f"{path}.{key}" if path else str(key), depth + 1, seen)
    elif isinstance(value, list | tuple):
        _check_list(value, limits, where, path)
        if _is_counts(path):
            _check_sum(value, limits, where, path)
        for item in value:
            _check(item, limits, where, path, depth + 1, seen)
    elif isinstance(value, str):
        _check_text(value, where, short(path))
    elif type(value) in (int, float):
        most = _most(path, limits)
        # Inkling's patch is halved until it is odd; VideoMAE makes a row of nothing for each place of a film.
        if value == 0 and path.endswith(("patch_size", "hidden_size")):
            raise CorruptError(f"{where}: its config.json says {short(path)} is 0; fetch or convert it again")
        if (type(value) is int or math.isfinite(value)) and abs(value) > most:
            raise CorruptError(
                f"{where}: its config.json says {short(path)} is {short(value)}, and its tensors allow {most} at most; "
                "the file is damaged or was made to do harm, do not use it"
            )


def _check_text(value: Any, where: object, what: str) -> None:
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise CorruptError(
            f"{where}: its config.json says {what} by a text of {len(value)} letters, at most {MAX_TEXT} are accepted"
        )


def _check_list(values: Any, limits: Limits, where: object, path: str) -> None:
    """Raises CorruptError for more values than there can be layers: some classes go through a list by its square, or through
    it for each of a number."""
    if len(values) > max(MAX_LIST, limits.tensors) and not _words(path) & _LONG:
        raise CorruptError(
            f"{where}: its config.json says {short(path)} by a list of {len(values)} values, and its tensors allow "
            f"{max(MAX_LIST, limits.tensors)} at most; the file is damaged or was made to do harm, do not use it"
        )


def _check_types_of_layers(pairs: Any, limits: Limits, where: object) -> None:
    """Raises CorruptError for GPT-Neo's lists of types, each to be repeated so many times, that make more layers than there
    can be."""
    made = 0
    for pair in pairs if isinstance(pairs, list) else ():
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list) and type(pair[1]) is int:
            made += max(1, len(pair[0])) * max(0, pair[1])  # an empty list is gone through as often
    if made > limits.count:
        raise CorruptError(
            f"{where}: its config.json makes {made} layers of its attention_types, and its tensors allow {limits.count} at "
            "most; the file is damaged or was made to do harm, do not use it"
        )


def _words(path: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", path.rpartition(".")[2].lower()))


def _is_counts(path: str) -> bool:
    """Whether a list under a key says how often something is made at each place; others name layers (`moe_layers`)."""
    words = _words(path)
    return bool(
        words & {"depth", "depths", "repeats"}
        or (words & {"blocks", "layers"} and words & {"num", "numb", "n", "per"})
    )


def _check_sum(counts: Any, limits: Limits, where: object, path: str) -> None:
    """Raises CorruptError for counts each of which may be true, and not all."""
    together = sum(n for n in counts if type(n) is int and n > 0)
    if together > limits.count:
        raise CorruptError(
            f"{where}: its config.json says {short(path)} is {together} in all, and its tensors allow {limits.count} "
            "at most; the file is damaged or was made to do harm, do not use it"
        )


def _most(path: str, limits: Limits) -> float:
    """The largest number that may stand under a key."""
    words = _words(path)
    if words & {"layers", "layer"} and not words & {"id", "ids", "dim", "size", "theta", "rate"}:
        return max(LEAST_COUNT, limits.tensors)
    if words & {"labels", "classes"}:  # TimmWrapper makes labels of its classes
        return min(MAX_LABELS, max(LEAST_COUNT, limits.dimension))
    # Points of training are drawn from a mask (Mask2Former).
    if words & _COUNTS and not words & {"channels", "dim", "size", "theta", "rate", "train"}:
        return limits.count
    if words & _SIZES and not words & _FREE:
        return limits.size
    return MAX_INTEGER if words & (_COUNTS | _SIZES) else MAX_NUMBER


def is_token(value: Any) -> bool:
    """Whether it can be a token's number; -1 is none."""
    return type(value) is int and -1 <= value <= MAX_INTEGER


def _check_type(value: Any, where: object, key: str) -> None:
    if value == [] and key.endswith("_token_id"):
        raise CorruptError(f"{where}: its config.json has no token under {key}; fetch or convert it again")
    if key.endswith(_TOKENS) and value is not None:
        if not all(is_token(token) for token in (value if isinstance(value, list | tuple) else [value])):
            raise CorruptError(
                f"{where}: its config.json says {key} is {short(value)}, expected a token, or a list of tokens; "
                "the file is damaged, fetch or convert it again"
            )
    if key in _LEAST and type(value) is int and value < _LEAST[key]:
        raise CorruptError(f"{where}: its config.json says {key} is {value}; fetch or convert it again")
    if value is None or key not in _TYPES:
        return
    kind, expected = _TYPES[key]
    if type(value) is not kind or (isinstance(value, int) and abs(value) > MAX_INTEGER):
        raise CorruptError(
            f"{where}: its config.json says {key} is {short(value)}, expected {expected}; "
            "the file is damaged, fetch or convert it again"
        )


def _check_labels(value: Any, where: object, key: str) -> None:
    if isinstance(value, Mapping) and len(value) > MAX_LABELS:
        raise CorruptError(
            f"{where}: its config.json has {len(value)} labels, at most {MAX_LABELS} are accepted"
        )
    if value is not None and not isinstance(value, Mapping):
        raise CorruptError(f"{where}: its config.json has a {key} that is no object")
    for name, label in (value or {}).items():
        _check_text(name, where, key)
        _check_text(label, where, key)
        if isinstance(label, list | Mapping):
            raise CorruptError(
                f"{where}: its config.json has a label under {key} that is no text and no number"
            )

"""The attention profile in a calibration file, checked before anything is made from it."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from nstf.runtime.kv_formats import BLOCK
from nstf_convert.pipeline.attention.profile import FORMATS, SINK, THRESHOLDS, WINDOWS
from nstf_convert.pipeline.calibrate.facts import Problem, count, keys, text, texts

# Expected losses in nats, and relative errors: no sum of them leaves float64, and no rounding of them float32.
MOST = 1e12
# Of a plan's heads.
MOST_ERROR = 1e6
# Shares may be rounded up.
ONE = 1.001


def check_attention(
    found: Any,
    names: Collection[str],
    config: Any,
    layer_windows: Sequence[int],
    limit: int,
    numbers: Callable[..., Any],
    ids: Callable[[str, int], None],
) -> None:
    """Raises Problem for a profile that nstf does not write for a model.

    found: the metadata's `attention`; names: of the tensors. config: the decoder's; layer_windows: the model's; limit: the
    most tokens it has positions for. numbers(name, shape, most, dtype), ids(name, length): check a tensor.
    """
    keys(found, "attention", {"profile", "contexts"}, set())
    cut, of = found["contexts"], found["profile"]
    keys(cut, "attention: contexts", {"domains", "length", "wanted", "note"}, set())
    keys(of, "attention: profile", {"context", "windows"}, {"layer_windows"})
    length = count(cut["length"], "attention: length", BLOCK, limit)
    count(cut["wanted"], "attention: wanted", length)
    if length % BLOCK or count(of["context"], "attention: context") != length:
        raise Problem(f"attention: contexts of {length} tokens")
    if cut["note"] is not None:
        text(cut["note"], "attention: note")
    windows = [w for w in WINDOWS if w + SINK <= length // 2]
    if of["windows"] != windows or of.get("layer_windows", list(layer_windows)) != list(layer_windows):
        raise Problem("attention: windows that no profile of this model has")
    keys(cut["domains"], "attention: domains", {"choose", "report"}, set())
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    few = len(windows)
    shapes = {
        "keys": (groups, len(FORMATS)), "values": (groups, len(FORMATS)), "rings": (groups, few),
        "streaming": (heads, few), "blocks": (heads, len(THRESHOLDS)), "density": (heads, len(THRESHOLDS)),
        "error": (heads, few + len(THRESHOLDS)), "mass": (heads, few + len(THRESHOLDS)),
    }  # fmt: skip
    contexts = {
        f"{split}:{i}"
        for split, domains in cut["domains"].items()
        for i in range(len(texts(domains, f"attention: domains of {split}")))
    }
    if not all(cut["domains"].values()) or set(names) != contexts | shapes.keys():
        raise Problem("attention: its tensors are not those of a profile")
    for name, shape in shapes.items():
        most = {"density": ONE, "mass": ONE, "error": MOST_ERROR}.get(name, MOST)
        numbers(f"attention:{name}", (len(layer_windows), *shape), most, torch.float64)
    for name in sorted(contexts):
        ids(f"attention:{name}", length)

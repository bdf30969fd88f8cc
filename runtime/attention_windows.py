"""Layers of a model that slide over a window, beside an attention plan.

A layer with a window of W positions is a band without sinks: the query at i sees the keys j with i - W < j <= i. A plan says
so in its usual words (streaming heads with sink 0 and window W, groups that keep no more than that), so version 2 needs no
others; what is the model's own and what is the plan's choice follows from the model's config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nstf.errors import UnsupportedError

if TYPE_CHECKING:
    from nstf.runtime.attention_plan import AttentionPlan

FULL, SLIDING = "full_attention", "sliding_attention"
# What plans, and divisions among ranks, take to be the same in every layer.
ALIKE = frozenset(("num_attention_heads", "num_key_value_heads", "head_dim"))


def check_alike(config: Any) -> None:
    """Raises UnsupportedError for a model whose layers have heads of several sizes or numbers, as Gemma 4's have: where they
    differ, transformers refuses to read them from the config of the whole model, by a RuntimeError."""
    differing = ALIKE & set(getattr(config, "per_layer_attributes", None) or ())
    if differing:
        raise UnsupportedError(
            f"the layers of models of type {config.model_type!r} differ in {', '.join(sorted(differing))}"
        )


def windows_of(config: Any) -> tuple[int, ...]:
    """Positions that each layer sees, 0 for all of them: of transformers' config, or of a completed config.json.

    Raises UnsupportedError for layers of another kind, or with other heads each, which no plan describes.
    """
    check_alike(config)

    def stated(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    window = 0 if stated("use_sliding_window") is False else int(stated("sliding_window") or 0)
    # Mistral and those like it name no kinds: a window is that of all layers.
    kinds = stated("layer_types") or [SLIDING if window else FULL] * int(stated("num_hidden_layers"))
    others = {str(kind) for kind in kinds} - {FULL, SLIDING}
    if others:
        raise UnsupportedError(f"no attention plan for layers of type {', '.join(sorted(others))}")
    if SLIDING in kinds and not window:
        raise UnsupportedError("the config names sliding layers and no sliding_window")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def check_windows(plan: AttentionPlan, windows: Sequence[int]) -> None:
    """Raises ValueError when a head reads further back than its layer of the model does.

    windows: of each layer, as `windows_of` gives them.
    """
    for index, (layer, window) in enumerate(zip(plan.layers, windows, strict=True)):
        if not window:
            continue
        for number, head in enumerate(layer.heads):
            sink, near, least = head.streaming or (0, 0, 0)
            # Before `least` tokens a head is dense: within the window as long as that is no longer.
            if head.streaming is None or sink or near > window or least > window + 1:
                raise ValueError(
                    f"attention plan: layers[{index}].heads[{number}] is {head.pattern} {head.params}, but the model's "
                    f"layer slides over {window} positions: it takes a band without sinks of at most that"
                )

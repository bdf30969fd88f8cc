"""The attention plan of a file as `nstf inspect` shows it: bytes of the cache, what it loses, and every layer."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nstf_convert.cli.sizes import format_bytes


def windows_in(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Windows of the layers of a file's config.json; None where it does not say or is not understood."""
    from nstf.errors import UnsupportedError
    from nstf.runtime.attention_windows import windows_of
    from nstf.runtime.engine_config import completed

    try:
        full = completed(config)
        return windows_of(full.get("text_config") or full)
    except (UnsupportedError, ValueError, TypeError, AttributeError):
        return None


def kv_summary(stored: Mapping[str, Any], windows: Sequence[int] | None = None) -> dict[str, Any]:
    """The plan's figures, JSON-ready. windows: of the model's layers, None where all see everything.

    Raises CorruptError for a plan that cannot be read.
    """
    from nstf.errors import CorruptError
    from nstf.runtime.attention_plan import parse_plan
    from nstf.runtime.kv_formats import dense_bytes, layer_bytes

    try:
        plan = parse_plan(dict(stored))
    except ValueError as error:
        raise CorruptError(f"the {error}: convert the model again") from error
    if windows is not None and len(windows) != len(plan.layers):
        windows = None
    dense = dense_bytes(plan, plan.context, windows)
    layers = []
    for index, layer in enumerate(plan.layers):
        heads = Counter(head.pattern for head in layer.heads)
        groups = Counter(
            f"keys {g.keys}, values {g.values}" + (f", sink {g.sink} + window {g.recent}" if g.evict else "")
            for g in layer.groups
        )
        size = layer_bytes(layer, plan.head_dim, plan.context)
        layers.append(
            {
                "layer": index,
                "size_bytes": size,
                "window": windows[index] if windows else 0,
                "groups": dict(groups),
                "heads": dict(sorted(heads.items())),
            }
        )
    return {
        "context": plan.context,
        "kv_budget": plan.kv_budget,
        "size_bytes": sum(layer["size_bytes"] for layer in layers),
        "dense_bytes": dense,
        "heads": plan.patterns(),
        "kld": {"allowed": plan.kld.allowed, "choose": plan.kld.choose, "report": plan.kld.report},
        "lengths": [
            {"length": n.length, "kld": n.kld, "passkey": n.passkey, "needles": n.needles}
            for n in plan.lengths
        ],
        "layers": layers,
    }


def chosen_pairs(reported: Mapping[str, Any]) -> list[tuple[str, object]]:
    """The plan of a conversion's report as lines of text, without its layers: what it lost to, what it costs."""
    plan = {name: value for name, value in reported.items() if name != "choice"}
    choice = reported.get("choice") or {}
    pairs = kv_pairs({**kv_summary(plan, choice.get("layer_windows")), "layers": []})
    for rival in choice.get("rivals", ()):
        kept = "; kept, since the plan was not better" if choice["is_uniform"] else ""
        words = f"KLD {rival['kld']:.3g}, {rival['share']:.3f} of dense 16 bits{kept}"
        pairs.append((f"all groups {rival['setting']}", words))
    if choice.get("note"):
        pairs.append(("contexts", choice["note"]))
    return pairs


def kv_pairs(found: Mapping[str, Any]) -> list[tuple[str, object]]:
    """The same as lines of text."""
    size, dense = found["size_bytes"], found["dense_bytes"]
    pairs: list[tuple[str, object]] = [
        (
            "KV cache",
            f"{size} bytes ({format_bytes(size)}) at {found['context']} tokens, {size / dense:.3f} of dense 16 bits",
        ),
        ("attention heads", ", ".join(f"{n} {p}" for p, n in sorted(found["heads"].items()))),
    ]
    kld = [f"{found['kld'][n]:g} {n}" for n in ("report", "choose", "allowed") if found["kld"][n] is not None]
    pairs.append(("KLD of the plan", ", ".join(kld) or "not measured"))
    for at in found["lengths"]:
        parts = [] if at["kld"] is None else [f"KLD {at['kld']:g}"]
        for name in ("passkey", "needles"):
            if at[name] is not None:
                dense_right, planned, asked = at[name]
                parts.append(f"{name} {planned} of {asked} (dense {dense_right})")
        pairs.append((f"at {at['length']} tokens", ", ".join(parts) or "not measured"))
    for layer in found["layers"]:
        groups = "; ".join(f"{n} x {what}" for what, n in layer["groups"].items())
        heads = ", ".join(f"{n} {p}" for p, n in layer["heads"].items())
        own = f" | the model slides over {layer['window']}" if layer["window"] else ""
        pairs.append(
            (f"layer {layer['layer']}", f"{layer['size_bytes']} bytes: {groups} | heads: {heads}{own}")
        )
    return pairs

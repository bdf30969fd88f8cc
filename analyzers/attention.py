"""What every attention head of a causal language model looks at, and how well sparse patterns reproduce it.

`profile_attention` runs the model on windows of text with an attention function of its own, which sees
nothing but q, k and v (the weights may be brought in by hooks, layer by layer). Of every window the last
128-256 queries are scored, one KV group at a time, so that no more than a few [heads of a group, queries,
T] matrices exist at once. `nstf.analyzers.attention_select.select_plan` turns the profile into an attention
plan.
"""

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nstf.analyzers.attention_patterns import GroupScores, Pattern, grid, score_group
from nstf.errors import UnsupportedError

NAME = "nstf_profile"


@dataclass(frozen=True)
class LengthProfile:
    """Scores at one context length, over its windows (L layers, H heads, G KV groups, C patterns).

    error: [L, H, C] relative L2 error of the head's output, the worst window; inf where the length is too
    short. group_error: [L, G, C] the same for the heads of a KV group together, which eviction must
    satisfy. mass, share: [L, H, C] smallest mass kept and mean share of keys read. keys: [L, H] mean share
    of keys for 95 % of the mass. weight: [L, H] the head's share of the squared norm of its layer's
    attention output.
    """

    windows: int
    error: Tensor
    group_error: Tensor
    mass: Tensor
    share: Tensor
    keys: Tensor
    weight: Tensor


@dataclass(frozen=True)
class AttentionProfile:
    """The profile of a model: one `LengthProfile` for each window length, in tokens, ascending."""

    queries: int
    head_dim: int
    patterns: tuple[Pattern, ...]
    lengths: dict[int, LengthProfile]

    def as_dict(self) -> dict[str, Any]:
        """The profile as JSON-ready data for reports (too large for an artifact)."""
        return {
            "queries": self.queries,
            "head_dim": self.head_dim,
            "patterns": [{"name": p.name, **dict(p.params)} for p in self.patterns],
            "lengths": {
                str(length): {
                    name: getattr(scores, name).nan_to_num(posinf=-1.0).tolist()
                    for name in ("error", "group_error", "mass", "share", "keys", "weight")
                }
                for length, scores in self.lengths.items()
            },
        }


class _Recorder:
    """Scores of the layers of one window, in the order in which they run."""

    def __init__(self, queries: int, patterns: Sequence[Pattern]) -> None:
        self.queries, self.patterns = queries, patterns
        self.layers: dict[int, list[GroupScores]] = {}

    def score(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        per_group = query.shape[1] // key.shape[1]
        last = query[0, :, -self.queries :].float()
        self.layers[layer] = [
            score_group(
                last[group * per_group : (group + 1) * per_group],
                key[0, group].float(),
                value[0, group].float(),
                scale,
                self.patterns,
            )
            for group in range(key.shape[1])
        ]


_ACTIVE: ContextVar[_Recorder] = ContextVar("nstf_profile")


@torch.no_grad()
def profile_attention(
    model: nn.Module,
    windows: Sequence[Tensor],
    *,
    queries: int = 128,
    patterns: Sequence[Pattern] | None = None,
) -> AttentionProfile:
    """Profile `model` on `windows` (token ids [T] each; windows of one length are one profile length).

    queries: how many last positions of a window are scored, a multiple of 64. Raises ValueError for
    unusable windows and UnsupportedError for models that do not attend through transformers' attention
    interface.
    """
    if queries < 64 or queries % 64:
        raise ValueError(f"queries is {queries}; it must be a multiple of 64")
    if not windows:
        raise ValueError("no windows of text to profile attention on")
    short = [len(window) for window in windows if window.ndim != 1 or len(window) < 2 * queries]
    if short:
        raise ValueError(
            f"a window of {short[0]} tokens is too short (or not 1-D): {queries} queries need twice that"
        )
    chosen = tuple(grid() if patterns is None else patterns)
    by_length: dict[int, list[dict[int, list[GroupScores]]]] = {}
    head_dim = 0
    for window in sorted(windows, key=len):
        recorder = _Recorder(queries, chosen)
        head_dim = _run(model, window, recorder)
        by_length.setdefault(len(window), []).append(recorder.layers)
    return AttentionProfile(
        queries, head_dim, chosen, {length: _reduce(runs) for length, runs in by_length.items()}
    )


def _run(model: nn.Module, window: Tensor, recorder: _Recorder) -> int:
    """One forward pass with the recording attention function; gives the head size."""
    from transformers import AttentionInterface

    config: Any = getattr(model, "config", None)
    if config is None or not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError(
            f"{type(model).__name__} does not attend through transformers' attention interface"
        )
    text = config.get_text_config(decoder=True)
    AttentionInterface.register(NAME, _recording_attention)
    before = text._attn_implementation
    options: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        # The logits of all positions would be larger than everything else together.
        options["logits_to_keep"] = 1
    token = _ACTIVE.set(recorder)
    try:
        text._attn_implementation = NAME
        model(input_ids=window[None].to(_device(model)), **options)
    finally:
        text._attn_implementation = before
        _ACTIVE.reset(token)
    if sorted(recorder.layers) != list(range(text.num_hidden_layers)):
        raise UnsupportedError(
            f"{type(model).__name__}: {len(recorder.layers)} of {text.num_hidden_layers} layers attend "
            "through transformers' attention interface; attention is analysed only where all do"
        )
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _device(model: nn.Module) -> torch.device:
    """Where the inputs go: to the first real parameter, else the CPU (weights that come just in time)."""
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


def _recording_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Full causal attention (query [1, H, T, D], key, value [1, G, T, D] -> [1, T, H, D]), scored on
    the way.
    """
    for name in ("softcap", "sliding_window", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"attention with `{name}` (layer {module.layer_idx}) cannot be analysed")
    if attention_mask is not None or query.shape[2] != key.shape[2] or kwargs.get("is_causal") is False:
        raise UnsupportedError("attention is analysed on whole windows of causal attention only")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    _ACTIVE.get().score(module.layer_idx, query, key, value, scale)
    per_group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(per_group, dim=1) for t in (key, value))
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return out.transpose(1, 2).contiguous(), None


def _reduce(runs: list[dict[int, list[GroupScores]]]) -> LengthProfile:
    """Windows of one length together: worst error, smallest mass, means of the rest."""
    sq_error = _stack(runs, "sq_error")
    sq_norm = torch.stack(
        [torch.stack([_by_group(g, "sq_norm") for g in r.values()]) for r in _ordered(runs)]
    )
    groups = sq_norm.shape[2]
    error = (sq_error / sq_norm[..., None].clamp_min(1e-30)).sqrt()
    group_error = (sq_error.sum(3) / sq_norm.sum(3)[..., None].clamp_min(1e-30)).sqrt()
    keys = torch.stack([torch.stack([_by_group(g, "keys") for g in r.values()]) for r in _ordered(runs)])
    weight = sq_norm / sq_norm.sum(dim=(2, 3), keepdim=True).clamp_min(1e-30)
    heads = groups * sq_norm.shape[3]
    return LengthProfile(
        windows=len(runs),
        error=error.amax(0).reshape(-1, heads, error.shape[-1]),
        group_error=group_error.amax(0),
        mass=_stack(runs, "mass").amin(0).reshape(-1, heads, error.shape[-1]),
        share=_stack(runs, "share").mean(0).reshape(-1, heads, error.shape[-1]),
        keys=keys.mean(0).reshape(-1, heads),
        weight=weight.mean(0).reshape(-1, heads),
    )


def _ordered(runs: list[dict[int, list[GroupScores]]]) -> list[dict[int, list[GroupScores]]]:
    return [dict(sorted(run.items())) for run in runs]


def _by_group(groups: list[GroupScores], name: str) -> Tensor:
    return torch.stack([getattr(group, name) for group in groups]).cpu()


def _stack(runs: list[dict[int, list[GroupScores]]], name: str) -> Tensor:
    """[windows, L, G, R, C] from [C, R] of every group."""
    return torch.stack(
        [torch.stack([_by_group(g, name).transpose(1, 2) for g in run.values()]) for run in _ordered(runs)]
    )

"""The attention plan of a conversion: profiled and verified on held-out text, kept in the work directory."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError
from nstf_convert.measure import score_window, summarise
from nstf_convert.pipeline.calibrate.statistics import held_out_batches
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.workdir import content_key
from nstf_convert.streamed import StreamedModel

log = logging.getLogger("nstf")

# Context lengths patterns are profiled at. Longer ones cost the square; a pattern's minimum length is stored.
PROFILE_LENGTHS = (512, 1024)
# Nats per token that planned attention may cost: a third of what bfloat16 arithmetic alone costs.
KLD_BUDGET = 3e-4
MEASURED_WINDOWS = 2


def attention_plan(session: Session) -> dict[str, Any] | None:
    """The plan as stored in the artifact, or None for models without causal attention that can be planned."""
    if session.calibration is None or not session.calibration.metadata["language"]:
        return None
    key = content_key(
        kind="attention",
        calibration=session.calibration_fingerprint(),
        lengths=PROFILE_LENGTHS,
        budget=KLD_BUDGET,
        version=1,
    )
    found = session.work.find_metadata(key)
    if found is None:
        with session.stages.stage("attention"):
            found = {"plan": _make(session)}
        session.work.put(key, {}, found)
    return found["plan"]  # type: ignore[no-any-return]


def _make(session: Session) -> dict[str, Any] | None:
    from nstf.analyzers.attention import profile_attention
    from nstf.analyzers.attention_select import select_plan

    model = session.reference()
    ids = [b["input_ids"][0] for b in held_out_batches_and_fit(session)]
    limit = getattr(model.module.config.get_text_config(), "max_position_embeddings", 1 << 30)
    lengths = [n for n in PROFILE_LENGTHS if n <= limit]
    profiled = [w for n in lengths for w in _windows(ids, n, 1)]
    measured = _windows(ids[::-1], max(lengths, default=0), MEASURED_WINDOWS) if lengths else []
    if not profiled or not measured:
        log.warning("no attention plan: the calibration text has no window of %s tokens", PROFILE_LENGTHS[0])
        return None
    try:
        with torch.no_grad():
            model.settle()
            profile = profile_attention(model.module, profiled)
            return select_plan(profile, kld_budget=KLD_BUDGET, measure=_measure(model, measured))
    except UnsupportedError as error:
        log.warning("no attention plan: %s", error)
        return None


def held_out_batches_and_fit(session: Session) -> list[dict[str, Tensor]]:
    """Texts to profile on. Patterns have no weights to overfit, and the plan is measured on other windows."""
    if session.calibration is None:
        return []
    return held_out_batches(session.calibration)


def _measure(model: StreamedModel, windows: Sequence[Tensor]) -> Any:
    from nstf.runtime.attention import apply_plan, remove_plan

    full = [model.hidden(w[None])[0] for w in windows]

    def measure(plan: dict[str, Any]) -> float:
        apply_plan(model.module, plan)
        try:
            planned = [model.hidden(w[None])[0] for w in windows]
        finally:
            remove_plan(model.module)
        with model.holding(model.head):
            scores = [
                score_window(model, a, model, b, w) for a, b, w in zip(full, planned, windows, strict=True)
            ]
        return summarise(scores).mean_kl

    return measure


def _windows(ids: Sequence[Tensor], length: int, count: int) -> list[Tensor]:
    """`count` windows of `length` tokens cut from consecutive texts; fewer when the text ends."""
    flat = torch.cat(list(ids)) if ids else torch.empty(0, dtype=torch.int64)
    available = min(count, flat.numel() // length) if length else 0
    return [flat[i * length : (i + 1) * length] for i in range(available)]

"""The attention plan of a conversion: profiled on the original weights, chosen and measured on those that are stored.

The profile belongs to the calibration: `nstf calibrate --context N` leaves it in the file, with its contexts.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nstf.errors import UsageError
from nstf.runtime.attention_plan import AttentionPlan, LengthResult, PlanKLD
from nstf.runtime.kv_formats import BLOCK
from nstf_convert.dataset import load_text
from nstf_convert.made_up import longest_window
from nstf_convert.pipeline.attention import possible, simulate
from nstf_convert.pipeline.attention.choose import check_budget, choose
from nstf_convert.pipeline.attention.chooser import Chosen
from nstf_convert.pipeline.attention.contexts import Contexts, contexts
from nstf_convert.pipeline.attention.measured import Measure, by_length, summarised
from nstf_convert.pipeline.attention.possible import CONTEXT
from nstf_convert.pipeline.attention.profile import Profile, profile, profile_of_answers
from nstf_convert.pipeline.attention.retrieval import Haystack, compared, haystack
from nstf_convert.pipeline.calibrate import text as texts
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.tensorfile import TensorFile, TensorFileWriter
from nstf_convert.pipeline.store.workdir import content_key
from nstf_convert.streamed import StreamedModel

log = logging.getLogger("nstf")

# Nats per token that a plan may cost when neither a budget nor an allowance is given.
ALLOWED = 0.001
# Passkeys (one a context) and contexts of NEEDLES needles that a conversion asks for.
PASSKEYS = 2
NEEDLES = 5
NEEDLE_CONTEXTS = 1
# Contexts by whose needles a plan is chosen, and needles of each.
CHOOSING_CONTEXTS = 4
CHOOSING = 10
# Seeds of those that measure plans, and of those that price options.
FIRST_MEASURED, FIRST_PRICED = 2000, 3000
PREFIX = "attention:"
LONGEST = 0.000123457


@dataclass(frozen=True, eq=False)
class Found:
    """A profile with the contexts that choose and report."""

    profile: Profile
    contexts: Contexts


def find_profile(session: Session) -> Found:
    """The profile that the calibration file or an earlier run left, or a new one.

    Raises UsageError when the calibration was given and has none for this length, or the text is too short;
    UnsupportedError for models whose attention cannot be planned.
    """
    options = session.options
    given = session.calibration
    if options.calibration is not None and given is not None:
        found = given.metadata.get("attention")
        if found is None or options.context not in (None, found["contexts"]["wanted"]):
            has = (
                "has no attention profile"
                if found is None
                else f"is for {found['contexts']['wanted']} tokens"
            )
            wanted = options.context or CONTEXT
            raise UsageError(
                f"the calibration file {options.calibration} {has}: run `nstf calibrate {options.model} "
                f"--context {wanted}`, or leave `calibration` out"
            )
        tensors = {n.removeprefix(PREFIX): given.get(n) for n in given.names() if n.startswith(PREFIX)}
        return _unpacked(tensors, found)
    model = session.reference()
    key = content_key(
        kind="attention profile",
        calibration=session.calibration_fingerprint(),
        context=options.context,
        version=3,
    )
    kept = session.work.find(key)
    if kept is not None:
        return _unpacked(*kept)
    with session.stages.stage("attention profile"):
        limit = longest_window(model)
        wanted = options.context or min(CONTEXT, limit)
        cut = contexts(session.tokenizer(), _sources(session), wanted, limit)
        session.job.check_datasets()
        model.settle()
        found = Found(profile(model, cut.choose, options.seed), cut)
    session.work.put(key, *_packed(found))
    return found


def _sources(session: Session) -> Mapping[str, Iterable[str]]:
    """The datasets, or the long texts that come with Python and nstf: code, and prose as one text."""
    if session.options.datasets:
        return {path: load_text(path) for path in session.options.datasets}
    return {"code": texts.standard_library(), "prose": ["\n\n".join(texts.prose())]}


def write_with_profile(session: Session, source: TensorFile, path: Path) -> None:
    """A calibration file with everything of `source` and the attention profile of the session."""
    tensors, facts = _packed(find_profile(session))
    with TensorFileWriter(path) as writer:
        for name in sorted(source.names()):
            writer.add(name, source.get(name))
        for name, value in tensors.items():
            writer.add(f"{PREFIX}{name}", value)
        writer.metadata = {**source.metadata, "attention": facts}


def widest(session: Session) -> dict[str, Any]:
    """A plan that takes at least as many bytes as any that is made: the header is counted before the plan is known."""
    config: Any = session.reference().module.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    number = 2**26
    head = {
        "pattern": "block_sparse",
        "params": {"threshold": LONGEST, "stride": number},
        "min_length": number,
        "error": LONGEST,
        "mass": LONGEST,
    }
    fmt = {"bits": 16, "by": "channel", "rotate": False}
    group = {"sink": number, "recent": number, "min_length": number, "keys": fmt, "values": fmt}
    length = {"length": number, "kld": LONGEST, "passkey": [number] * 3, "needles": [number] * 3}
    layer = {"heads": [head] * heads, "groups": [group] * groups}
    return {
        "version": 2,
        "context": number,
        "kv_budget": LONGEST,
        "head_dim": number,
        "kld": {"allowed": LONGEST, "choose": LONGEST, "report": LONGEST},
        "layers": [layer] * config.num_hidden_layers,
        "lengths": [length] * 20,
    }


def prepare(session: Session) -> None:
    """The profile, before the long steps, so that a mistake in what was asked for shows at once.

    Raises UsageError and UnsupportedError as `find_profile`, BudgetError when nothing is as small as the budget.
    """
    possible.check(session)
    found = find_profile(session)
    if session.options.kv_budget is not None:
        check_budget(found.profile, head_size(session.reference()), session.options.kv_budget)


def head_size(model: StreamedModel) -> int:
    """Channels of an attention head."""
    config: Any = model.module.config.get_text_config(decoder=True)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def make(session: Session, model: StreamedModel) -> tuple[AttentionPlan, dict[str, Any]]:
    """(the plan, what else the report says) for the weights of `model`, which are those that are stored.

    Raises BudgetError when no plan fits.
    """
    options = session.options
    found = find_profile(session)
    allowed = options.kv_max_kl
    if options.kv_budget is None and allowed is None:
        allowed = ALLOWED
    with session.stages.stage("attention plan"):
        head_dim = head_size(model)
        model.settle()
        # A budget alone takes the plan that loses least, whatever that is.
        stacks = [] if allowed is None else hidden_in(session.tokenizer(), found.contexts)
        measure = Measure(model, found.contexts.choose, stacks)
        at_answers = answers_of(model, session.tokenizer(), found) if stacks else None
        chosen = choose(found.profile, head_dim, measure, options.kv_budget, allowed, at_answers=at_answers)
    with session.stages.stage("attention report"):
        plan = reported(
            model,
            session.tokenizer(),
            chosen,
            found.contexts,
            budget=options.kv_budget,
            allowed=allowed,
            head_dim=head_dim,
            seed=options.seed,
        )
    return plan, facts(chosen, found)


def reported(
    model: StreamedModel,
    tokenizer: Any,
    chosen: Chosen,
    cut: Contexts,
    *,
    budget: float | None,
    allowed: float | None,
    head_dim: int,
    seed: int,
    passkeys: int = PASSKEYS,
    needle_contexts: int = NEEDLE_CONTEXTS,
    needles: int = NEEDLES,
    measure: Measure | None = None,
    known: dict[bytes, int] | None = None,
) -> AttentionPlan:
    """The chosen plan with what it loses on the contexts that chose nothing, and what it retrieves.

    needles: of a context. measure, known: of `cut.report` and of `compared`, for several plans of one model.
    """
    measure = measure or Measure(model, cut.report)
    known = {} if known is None else known
    divergences = measure.divergences(chosen.layers)
    reported = summarised([kl[len(kl) // 2 :] for kl in divergences])
    if allowed is not None and reported.mean > allowed:
        log.warning(
            "attention: the report's contexts lose %.5f nats, %.5f were allowed", reported.mean, allowed
        )
    lengths = []
    filler = cut.report[0]
    attend = simulate.by_plan(chosen.layers)
    for length, kld in by_length(divergences, cut.length):
        asked: dict[str, tuple[int, int, int] | None] = {"passkey": None, "needles": None}
        # Of the longest contexts and of one in between: each costs as many passes as it has prompts.
        if length in (cut.length, cut.length // 4) and passkeys + needle_contexts:
            singles = _stacks(tokenizer, filler, length, 1, range(seed, seed + passkeys))
            first = seed + 1000
            several = _stacks(tokenizer, filler, length, needles, range(first, first + needle_contexts))
            asked["passkey"] = compared(model, singles, attend, known) if singles else None
            asked["needles"] = compared(model, several, attend, known) if several else None
        lengths.append(LengthResult(length, _short(kld), asked["passkey"], asked["needles"]))
    kld_facts = PlanKLD(allowed, _short(chosen.loss.mean), _short(reported.mean))
    return AttentionPlan(2, cut.length, budget, head_dim, kld_facts, tuple(chosen.layers), tuple(lengths))


def answers_of(
    model: StreamedModel, tokenizer: Any, found: Found, seed: int = 0
) -> Callable[[], Profile] | None:
    """Makes the profile of what the options of another profile lose at answers; None where contexts have no room for them.

    These are other answers than those that measure (`hidden_in`), which would look better than they are.
    """
    filler = found.contexts.choose[-1]
    for text in (filler[len(filler) // 2 :], filler):
        if stacks := _hidden(tokenizer, text, found.contexts.length, FIRST_PRICED):
            return partial(profile_of_answers, model, stacks, found.profile.windows, seed)
    return None


def hidden_in(tokenizer: Any, cut: Contexts) -> list[Haystack]:
    """Contexts with needles in the text that chooses, by which a plan is measured."""
    return _hidden(tokenizer, cut.choose[0], cut.length, FIRST_MEASURED)


def _hidden(tokenizer: Any, filler: Tensor, context: int, seed: int) -> list[Haystack]:
    """A quarter as long as the contexts where they have room."""
    for length in (context // 4 // BLOCK * BLOCK, context):
        if found := _stacks(tokenizer, filler, length, CHOOSING, range(seed, seed + CHOOSING_CONTEXTS)):
            return found
    return []


def _stacks(tokenizer: Any, filler: Tensor, length: int, needles: int, seeds: range) -> list[Haystack]:
    """Contexts with needles; none where the length has no room for them: short contexts, tokenizers of bytes."""
    try:
        return [haystack(tokenizer, filler, length, needles, s) for s in seeds]
    except ValueError as error:
        log.info("attention: not asked at %d tokens: %s", length, error)
        return []


def facts(chosen: Chosen, found: Found) -> dict[str, Any]:
    """What the report says beside the plan itself."""
    cut = found.contexts
    return {
        "share": chosen.share,
        "size_bytes": chosen.size_bytes,
        "choose_error": chosen.loss.error,
        "choose_upper": chosen.loss.upper,
        "choose_answers": chosen.loss.answers,
        "is_uniform": chosen.is_uniform,
        "layer_windows": list(found.profile.layer_windows),
        "rivals": [{"setting": name, "share": share, "kld": kld} for name, share, kld in chosen.rivals],
        "measured_over_expected": dict(zip(("keys", "values", "rings"), chosen.factors, strict=True)),
        "contexts": {split: list(names) for split, names in cut.domains.items()},
        "note": cut.note,
    }


def _packed(found: Found) -> tuple[dict[str, Tensor], dict[str, Any]]:
    profile, cut = found.profile, found.contexts
    tensors = {n: v for n, v in vars(profile).items() if isinstance(v, Tensor)}
    for split in ("choose", "report"):
        tensors |= {f"{split}:{i}": ids for i, ids in enumerate(getattr(cut, split))}
    described = {n: v for n, v in asdict(cut).items() if n not in ("choose", "report")}
    return tensors, {
        "profile": {
            "context": profile.context,
            "windows": list(profile.windows),
            "layer_windows": list(profile.layer_windows),
        },
        "contexts": described,
    }


def _unpacked(tensors: Mapping[str, Tensor], found: Mapping[str, Any]) -> Found:
    splits = {
        split: tuple(tensors[f"{split}:{i}"] for i in range(len(found["contexts"]["domains"][split])))
        for split in ("choose", "report")
    }
    values = {n: v for n, v in tensors.items() if ":" not in n}
    facts = found["contexts"]
    domains = {split: tuple(names) for split, names in facts["domains"].items()}
    cut = Contexts(**{**facts, **splits, "domains": domains})
    of = found["profile"]
    # Files from before layers could slide are of models whose layers see everything.
    own = tuple(of.get("layer_windows") or [0] * len(values["keys"]))
    return Found(Profile(of["context"], tuple(of["windows"]), own, **values), cut)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def is_plannable(session: Session) -> bool:
    """Whether the session has a language model that was calibrated on text."""
    file = session.calibration
    return session.model is not None and file is not None and bool(file.metadata["language"])

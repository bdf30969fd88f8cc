"""The calibration of a conversion: one that was given, one that an earlier run left, or a new one.

A new one of a large model uses each layer's Hessians for the proposals while they are there and does not store them. With
several GPUs the further ones do a part of it (nstf_convert.pipeline.helpers calls `help_with` there).
"""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nstf.errors import CorruptError, NstfError, UsageError
from nstf_convert.pipeline.calibrate import text as inputs
from nstf_convert.pipeline.calibrate.batches import digest
from nstf_convert.pipeline.calibrate.checked import check_given
from nstf_convert.pipeline.calibrate.gradients import HEAD_ELEMENTS, Gradients, leave_gradients
from nstf_convert.pipeline.calibrate.hessians import Consumer, Gathered, leave_proposals
from nstf_convert.pipeline.calibrate.share import GRADIENTS, NEEDED, Pieces, SharedStep, Sharer
from nstf_convert.pipeline.calibrate.statistics import calibrate_model, data_found
from nstf_convert.pipeline.machine import torch_threads
from nstf_convert.pipeline.propose.methods import method_families
from nstf_convert.pipeline.propose.units import Statistics
from nstf_convert.pipeline.store.tensorfile import TensorFile
from nstf_convert.pipeline.store.workdir import content_key, remove, undamaged
from nstf_convert.streamed import StreamedModel

if TYPE_CHECKING:
    from nstf_convert.pipeline.session import Session

log = logging.getLogger("nstf")

# Sampling text costs a forward pass per token: no more windows than this.
MOST_SAMPLED = 32
# Hessians that take more in all are used as they come, and not kept: front to back makes its own.
HESSIAN_BYTES = 3 << 30
# Bytes that wait per token, in widths of the hidden state, while all windows stand before a layer: the stream, what the
# model keeps of its own input, and rotary tables.
WAITING_WIDTHS = 3
# Of one layer in a backward pass: copies of the stream and of the feed-forward's activations, gradients among them. Of
# logits: copies of those that are there at a time.
LAYER_WIDTHS, LOGITS = 12, 6
# Bumped when a calibration means something else: older files are then refused.
CALIBRATION_VERSION = 11


def find(session: "Session") -> TensorFile | None:
    """The calibration that was given, or one that an earlier run left. Raises UsageError for one that does not belong to
    the model, CorruptError for a damaged one."""
    if session.options.calibration is not None:
        return _given(session, session.options.calibration)
    found = None if session.model is None else undamaged(_path(session))
    if found is not None and not _belongs(session, found):
        log.warning("a stored result is that of something else and is made again: %s", found.path)
        remove(found.path)
        found = None
    if found is None or session.model is None or not _fits_still(session, found, session.model):
        return None
    if drops_hessians(session, session.model):
        return found
    whole = all(f"hessian:{key}" in found.names() for key in found.metadata["hessians"])
    return found if whole else None  # the other run did not need them again


def find_shared(session: "Session") -> TensorFile | None:
    """In a helper's process: what the first process has found or made. It has also checked it."""
    given = session.options.calibration
    return undamaged(_path(session), whole=False) if given is None else TensorFile(given)


def make(session: "Session", model: StreamedModel) -> TensorFile:
    """A new calibration, in the work directory."""
    options = session.options
    with session.stages.stage("calibration text"):
        found = _waiting(session, model, inputs_of(session, model))
        data = replace(found, read=min(options.gradient_windows, len(found.fit)))
        if not options.reports_apart:
            data = data.without_report()
    facts = {
        "version": CALIBRATION_VERSION,
        "checkpoint": session.checkpoint.fingerprint(),
        "tokenizer": session.job.tokens_key(),
        "seed": options.seed,
        "device": session.device.type,
        "gradient_windows": data.read,
    }
    splits = {"fit": data.fit, "held_out": data.held_out, "report": data.report}
    identity = content_key(**facts, **{n: digest(b) for n, b in splits.items()})
    metadata = {**facts, "identity": identity, "job": session.job.key()} | {
        f"{n}_tokens": sum(next(iter(b.values())).numel() for b in batches) for n, batches in splits.items()
    }
    consumer = _proposing(session, identity) if drops_hessians(session, model) else None
    tokens, helpers, sharing = session.tokens_per_batch, session.helpers, None
    if helpers.any:
        formats = method_families(options.formats, options.bounds_time)
        sharing = Sharer(session.work, identity, tokens, formats, helpers.start_all, helpers.wait)
    with session.stages.stage("calibration"):
        calibrate_model(
            model,
            data,
            _path(session),
            metadata,
            options.seed,
            tokens,
            consumer,
            session.stages.tick,
            sharing,
            *_workers(session, model, data),
        )
    return TensorFile(_path(session))


def help_with(session: "Session", shared: SharedStep) -> None:
    """In a helper's process: does what it can of a step. Raises NstfError when the first process left nothing for it."""
    if session.model is None:
        raise NstfError(f"the model cannot be run: {session.model_reason}")
    model, seed = session.model, session.options.seed
    formats = method_families(session.options.formats, session.options.bounds_time)
    pieces = {
        step: Pieces(session.work, replace(shared, step=step), formats) for step in (GRADIENTS, shared.step)
    }
    data = data_found(*_needed(pieces[GRADIENTS]))
    if shared.step == GRADIENTS:
        leave_gradients(model, data, seed, shared.tokens_per_batch, pieces[GRADIENTS])
        return
    gradients = Gradients.from_stored(*_needed(pieces[shared.step]), session.device)
    consumer = _proposing(session, shared.identity)
    leave_proposals(model, data, gradients, shared.tokens_per_batch, consumer, pieces[shared.step])


def _needed(pieces: Pieces) -> tuple[dict[str, Any], dict[str, Any]]:
    found = pieces.find(NEEDED)
    if found is None:
        raise NstfError("the first process left nothing to begin with")
    return found


def drops_hessians(session: "Session", model: StreamedModel) -> bool:
    """Whether the Hessians take too much to be stored and nothing that was asked for needs them again."""
    if session.options.search_limits is not None or session.options.budget.kind == "max_kl":
        return False
    units = [session.units[w] for _, _, w in model.linear_modules()]
    widths = [u.elements // u.inner_shape[0] for u in units]
    return not session.only_calibrates and sum(4 * n * n for n in widths) > HESSIAN_BYTES


def _proposing(session: "Session", identity: str) -> Consumer:
    """What works out the candidates of the tensors behind each Hessian while it is there."""
    allowed = method_families(session.options.formats, session.options.bounds_time)
    once = {n for n, u in session.units.items() if u.lead == 1 and len(u.uses) == 1 and u.kept is None}

    def use(known: Gathered, keys: list[str]) -> None:
        session.statistics = Statistics(known, session.device)
        encoder = session.encoder_for(identity)
        entries = known.metadata["hessians"]
        units = [session.units[w] for k in sorted(keys) for w in entries[k]["weights"]]
        with torch_threads(session.threads):
            encoder.each(units, lambda u: encoder.candidates(u, allowed), lambda u: None)

    return Consumer(once.__contains__, use)


def _workers(session: "Session", model: StreamedModel, data: inputs.Data) -> tuple[int, bool]:
    """(batches that run side by side: as many as there are cores and memory for; whether each takes a core). Sharing a batch
    between cores takes 1.2 to 1.4 times as long."""
    config = model.module.config.get_text_config()
    if not data.language or (width := getattr(config, "hidden_size", 0)) == 0:
        return 1, False
    layers, inner = getattr(config, "num_hidden_layers", 1), getattr(config, "intermediate_size", None)
    inner = inner if isinstance(inner, int) else 4 * width
    # The stream before each layer, and one layer's activations with their gradients; some logits; the largest weight.
    activations = 4 * session.tokens_per_batch * (width * (layers + LAYER_WIDTHS) + LAYER_WIDTHS * inner)
    each = activations + LOGITS * 4 * HEAD_ELEMENTS["cpu"] + 8 * width * inner
    return session.machine.workers(each), session.machine.core_each


def _path(session: "Session") -> Path:
    return session.work.path / "calibration.safetensors"


def _given(session: "Session", path: Path) -> TensorFile:
    again = f"run `nstf calibrate {session.options.model}`"
    if not path.exists():
        raise UsageError(f"the calibration file {path} does not exist: write it with `nstf calibrate`")
    try:
        file = TensorFile(path)
    except CorruptError as error:
        raise CorruptError(
            f"the calibration file {path} is not a calibration file, or a damaged one: write it with `nstf calibrate`"
        ) from error
    if file.metadata.get("version") != CALIBRATION_VERSION:
        raise UsageError(f"the calibration file {path} was written by another version of nstf: {again}")
    if file.metadata.get("checkpoint") != session.checkpoint.fingerprint():
        raise UsageError(f"the calibration file {path} belongs to another model: {again}")
    # Files of earlier versions do not say; what is read by no tokenizer has none.
    own = session.job.tokens_key()
    if file.metadata.get("tokenizer", own) != own:
        raise UsageError(
            f"the calibration file {path} was made with other files of a tokenizer or processor: {again}"
        )
    if session.model is None:
        raise UsageError(
            f"a calibration file says nothing of a model that cannot be run ({session.model_reason})"
        )
    check_given(file, session.model, session.units)
    return file


def file_digest(path: Path) -> str:
    """The SHA-256 of a calibration file. Raises UsageError when there is none."""
    try:
        if not path.is_file():
            raise UsageError(f"the calibration file {path} does not exist: write it with `nstf calibrate`")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise NstfError(
            f"the calibration file {path} cannot be read ({error.strerror}); check the disk"
        ) from error


def _waiting(session: "Session", model: StreamedModel, data: inputs.Data) -> inputs.Data:
    """The data with as many windows to fit on as may wait before a layer; the first ones are of all datasets."""
    if not data.language:
        return data
    tokens = data.fit[0]["input_ids"].numel()
    kept = session.fitting("calibration", len(data.fit), _waiting_bytes(model, tokens))
    source = {**data.source, "fit_windows": kept, "found_windows": len(data.fit), "window_tokens": tokens}
    if session.tokens_per_batch < session.machine.tokens_per_batch and session.machine.short:
        source["tokens_at_a_time"] = session.tokens_per_batch
    domains = {**data.domains, "fit": data.domains["fit"][:kept]}
    return replace(data, fit=data.fit[:kept], source=source, domains=domains)


def _waiting_bytes(model: StreamedModel, tokens: int) -> int:
    """Of a window of so many tokens before a layer."""
    width = getattr(model.module.config.get_text_config(), "hidden_size", 1)
    return int(4 * WAITING_WIDTHS * width * tokens)


def _belongs(session: "Session", file: TensorFile) -> bool:
    """Whether a file is a calibration of this version, and of this job: one result may have taken another's name."""
    stated = file.metadata.get("version"), file.metadata.get("job")
    return stated == (CALIBRATION_VERSION, session.job.key())


def _fits_still(session: "Session", file: TensorFile, model: StreamedModel) -> bool:
    """Whether a calibration has as many windows as this run would take, and as many tokens at a time: another may have had
    other memory."""
    source = file.metadata["source"]
    if source.get("tokens_at_a_time", session.tokens_per_batch) < session.tokens_per_batch:
        return False
    if "found_windows" not in source:
        return True
    each = _waiting_bytes(model, source["window_tokens"])
    return session.fitting("calibration", int(source["found_windows"]), each) == int(source["fit_windows"])


def scored_as_language(session: "Session", model: StreamedModel) -> bool:
    """Whether the model is scored by the next tokens of a text, and not by its outputs for inputs that are given or made."""
    if session.calibration is not None:
        return bool(session.calibration.metadata["language"])
    return model.is_causal_lm and not _arrays_given(session)


def inputs_of(session: "Session", model: StreamedModel) -> inputs.Data:
    """What a new calibration reads. Raises UsageError where there is nothing."""
    if session.data is None:
        session.data = _data(session, model)
        session.job.check_datasets()
    return session.data


def _arrays_given(session: "Session") -> bool:
    datasets = session.options.datasets
    return len(datasets) == 1 and datasets[0].endswith(".safetensors")


def _data(session: "Session", model: StreamedModel) -> inputs.Data:
    options = session.options
    samples = options.calibration_windows
    if options.datasets:
        if _arrays_given(session):
            return inputs.tensor_data(Path(options.datasets[0]), model)
        tokenizer = session.tokenizer()
        return inputs.text_data(model, tokenizer, options.datasets, samples, options.seq_len, options.seed)
    if model.is_causal_lm:
        try:
            log.info(
                "no dataset: calibrating on documentation, code and prose that ship with Python and nstf"
            )
            return inputs.mixed_data(model, session.tokenizer(), samples, options.seq_len, options.seed)
        except UsageError as error:
            log.warning("%s: the model writes its own calibration text", error)
            sampled, start = min(samples, MOST_SAMPLED), _start_token(model)
            return inputs.sampled_data(model, sampled, options.seq_len, options.seed, start)
    if getattr(model.module, "main_input_name", "") == "input_ids":
        return inputs.documentation_data(model, session.tokenizer(), samples, options.seed)
    return inputs.noise_data(model, min(samples, 32), options.seed)


def _start_token(model: StreamedModel) -> int:
    config = model.module.config.get_text_config()
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(config, name, None)
        token = token[0] if isinstance(token, list) and token else token
        if isinstance(token, int):
            return token
    return 0

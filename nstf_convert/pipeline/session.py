"""Everything a conversion works with, opened once: checkpoint, model, work directory, calibration, units."""

import hashlib
import logging
import math
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from nstf import __version__
from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError
from nstf.kernels.formats import trellis
from nstf.kernels.trellis_encode import warm_up
from nstf_convert import dataset as texts
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline.calibrate import text as inputs
from nstf_convert.pipeline.calibrate.batches import digest
from nstf_convert.pipeline.calibrate.statistics import Consumer, Gathered, calibrate_model
from nstf_convert.pipeline.helpers import Helpers
from nstf_convert.pipeline.machine import Machine, machine
from nstf_convert.pipeline.prediction import Prediction, Text, predict
from nstf_convert.pipeline.products import rounding
from nstf_convert.pipeline.progress import NOTICE, Stages
from nstf_convert.pipeline.propose.candidates import method_families
from nstf_convert.pipeline.propose.encoder import Encoder
from nstf_convert.pipeline.propose.units import Statistics, find_units
from nstf_convert.pipeline.store.tensorfile import TensorFile, TensorFileWriter
from nstf_convert.pipeline.store.workdir import WorkDir, content_key, undamaged
from nstf_convert.streamed import StreamedModel

log = logging.getLogger("nstf")

# Sampling text costs a forward pass per token: no more windows than this.
MOST_SAMPLED = 32
# Models up to this size are expanded to float32 in the work directory once, instead of at every use.
EXPAND_BYTES = 4 << 30
# Hessians that take more in all are used as they come, and not kept: front to back makes its own.
HESSIAN_BYTES = 3 << 30
# Bytes that wait per token, in widths of the hidden state, while all windows stand before a layer: the stream, what the
# model keeps of its own input, and rotary tables.
WAITING_WIDTHS = 3
# Bumped when a calibration means something else: older files are then refused.
CALIBRATION_VERSION = 8
# The same command cannot succeed after one of these.
INPUT_ERRORS = (UsageError, CorruptError, UnsupportedError)


class Session:
    """An opened conversion. Use as a context manager; closing releases the work directory."""

    def __init__(
        self, options: ConvertOptions, stages: Stages, may_drop: bool = True, given: Machine | None = None
    ) -> None:
        """may_drop: large Hessians may be used while they are there and not stored. given: what a helper's process may use,
        as the first process found it, whose calibrated work directory it shares (nstf_convert.pipeline.helpers)."""
        self.helper = given is not None
        self.may_drop = may_drop
        self.options = options
        self.windows: dict[str, int] = {}
        self.stages = stages
        self.machine = given or machine(options.device, options.memory, options.gpu_memory, options.threads)
        self._folder = options.work_dir or options.output.with_name(options.output.name + ".work")
        self._made_folder = False
        self._opened = ExitStack()
        self._opened.callback(torch.set_num_threads, torch.get_num_threads())
        self._opened.callback(stages.close)
        torch.set_num_threads(self.threads)
        try:
            self.helpers = Helpers(options, self._folder, self.machine)
            self._opened.callback(self.helpers.close)
            self._open()
        except BaseException as error:
            self._close(type(error))
            raise

    def _open(self) -> None:
        options, stages = self.options, self.stages
        self._compiling = self._compile_ahead()
        with stages.stage("open"):
            self.checkpoint = self._opened.enter_context(closing(open_checkpoint(options.model)))
            self.config = _config(self.checkpoint)
            self.model_reason: str | None = None
            self.model = self._build_model()
        new = not self._folder.exists()
        self.work = self._opened.enter_context(WorkDir(self._folder, self._identity(), self.helper))
        self._made_folder = new
        self._opened.callback(self.helpers.close)  # before the lock goes
        self.source = self._expanded()
        self.units = {u.name: u for u in find_units(self._infos(), self.model)}
        self.calibration = self._found_calibration()
        if self.helper and self.calibration is None and self.model is not None:
            raise NstfError("there is no calibration to share")
        self.prediction = None if self.helper else self._predict()
        self.statistics = Statistics(None, self.device)
        self.encoder = self._encoder("none")
        if self.calibration is None and self.model is not None:
            self._make_calibration(self.model)
        self.statistics = Statistics(self.calibration, self.device)
        self.encoder = self._encoder(self.calibration_fingerprint())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(kind)

    def _close(self, kind: type[BaseException] | None) -> None:
        """Releases everything. A work directory of our own goes when nothing can resume it: after success, and
        after a mistake in the input, whose correction makes it another session."""
        self._opened.close()
        useless = kind is None or (self._made_folder and issubclass(kind, INPUT_ERRORS))
        if useless and self.options.work_dir is None and not self.helper:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def threads(self) -> int:
        """Threads of the CPU."""
        return self.machine.threads

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        return self.machine.device

    def _compile_ahead(self) -> threading.Thread | None:
        """Compiles the searches for a GPU while the model is opened and calibrated."""
        if not self.machine.on_gpu:
            return None

        def run() -> None:
            try:
                warm_up(self.device, trellis.codebook, self.machine.compilers)
            except Exception as error:  # the search itself will say what is wrong
                log.debug("compiling ahead: %s", error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of one forward call: so few that the layers' inputs, kept for a backward pass, fit the bound."""
        most = self.machine.tokens_per_batch
        if self.model is None or not self.model.is_causal_lm:
            return most
        config = self.model.module.config.get_text_config()
        each = 4 * getattr(config, "hidden_size", 1) * getattr(config, "num_hidden_layers", 1)
        return max(1, min(most, self.machine.activation_bytes // each))

    def fitting(self, step: str, windows: int, bytes_each: int, least: int = 1) -> int:
        """How many of `windows` may wait in memory at a time when each takes so many bytes; kept for the report, with a
        warning when it is fewer."""
        kept = min(windows, max(least, self.machine.activation_bytes // max(1, bytes_each)))
        if kept < windows and self.windows.get(step) != kept:
            room = self.machine.activation_bytes / 2**30
            short = ", less than there is room for usually: the file differs from one made with more memory"
            log.warning(
                "%s: %d of %d windows fit %.1f GiB of waiting activations%s; give more memory for all of them",
                step, kept, windows, room, short if self.machine.short else "",
            )  # fmt: skip
        self.windows[step] = kept
        return kept

    def wait_for_kernels(self) -> None:
        """Returns when the searches are compiled."""
        if self._compiling is not None:
            with self.stages.stage("compile kernels"):
                self._compiling.join()
            self._compiling = None

    def streamed(self, source: Callable[[str], Tensor], lazy: bool = False) -> StreamedModel:
        """A model of this architecture on the session's device, with weights from `source`.

        Raises UnsupportedError when transformers does not know it.
        """
        if self.config is None:
            raise UnsupportedError("there is no config.json")
        machine = self.machine
        resident = machine.resident_bytes if machine.on_gpu else 0
        model = StreamedModel(self.config, source, self.checkpoint.ties, lazy, machine.device, resident)
        if not machine.on_gpu:
            rounding(model.module, model.head)
        return model

    def reference(self) -> StreamedModel:
        """The original model. Raises UnsupportedError when it cannot be run."""
        if self.model is None:
            raise UnsupportedError(f"{self.options.model} cannot be run: {self.model_reason}")
        return self.model

    def calibration_fingerprint(self) -> str:
        """What the statistics came from; `none` without data."""
        return "none" if self.calibration is None else str(self.calibration.metadata["identity"])

    @property
    def keeps_hessians(self) -> bool:
        """Whether the Hessians of all layers are at hand, so that tensors can be encoded on their own."""
        return all(self.statistics.has_hessian(u) for u in self.units.values())

    def _encoder(self, calibration: str) -> Encoder:
        identity = content_key(checkpoint=self.checkpoint.fingerprint(), calibration=calibration)
        return Encoder(self.work, self._at_hand, self.statistics, identity, self.config, self.machine)

    def _at_hand(self, name: str) -> Tensor:
        """The original tensor, on the device where the model has left it there."""
        kept = None if self.model is None else self.model.weights.kept(name)
        return self.source(name) if kept is None else kept

    def _infos(self) -> dict[str, tuple[tuple[int, ...], str]]:
        out = {}
        for name in self.checkpoint.names():
            info = self.checkpoint.info(name)
            out[name] = (tuple(info.shape), str(info.dtype).removeprefix("torch."))
        return out

    def _build_model(self) -> StreamedModel | None:
        """The model, or None when transformers does not know it: then tensors are converted on their own."""
        if self.config is None:
            self.model_reason = "there is no config.json"
        else:
            try:
                return self.streamed(lambda name: self.source(name), lazy=True)
            except UnsupportedError as error:
                self.model_reason = str(error)
        log.warning(
            "%s: %s; its tensors are converted without calibration", self.options.model, self.model_reason
        )
        return None

    def _identity(self) -> dict[str, Any]:
        options = self.options
        calibration = options.calibration
        return {
            "checkpoint": self.checkpoint.fingerprint(),
            "datasets": [texts.fingerprint(d) for d in options.datasets],
            "calibration": None if calibration is None else _file_digest(calibration),
            "samples": options.samples or options.level.samples,
            "seq_len": options.seq_len,
            "seed": options.seed,
            "tool": __version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": self.device.type,
        }

    def _expanded(self) -> Callable[[str], Tensor]:
        """name -> the original tensor; small models come from a float32 copy in the work directory."""
        names = self.checkpoint.names()
        size = sum(math.prod(self.checkpoint.info(n).shape) * 4 for n in names)
        plain = self.checkpoint.kind == "safetensors" and all(
            str(self.checkpoint.info(n).dtype).endswith("float32") for n in names
        )
        if size > EXPAND_BYTES or plain or self.machine.on_gpu:
            return self.checkpoint.get
        path = self.work.path / "float32.safetensors"
        if undamaged(path) is None:
            with self.stages.stage("expand"), TensorFileWriter(path) as writer:
                for name in names:
                    value = self.checkpoint.get(name)
                    writer.add(name, value.to(torch.float32) if value.is_floating_point() else value)
        file = TensorFile(path)
        return file.get

    def _predict(self) -> Prediction | None:
        """Time and memory, for a model that can be run; the first line of a conversion, and its progress bar."""
        if self.model is None or not self.model.is_causal_lm:
            return None
        with self.stages.stage("prediction"):
            found = predict(
                list(self.units.values()), self.options, self.machine, self.checkpoint.total_bytes,
                self._text(self.model), self._drops_hessians(self.model),
            )  # fmt: skip
        self.stages.expect(found.seconds)
        machine = self.machine
        memory = [(found.host_bytes, machine.host_bytes, "memory")]
        if machine.on_gpu:
            memory.append((found.gpu_bytes, machine.gpu_bytes, "GPU memory"))
        told = ", ".join(f"{n / 2**30:.1f} of {bound / 2**30:.1f} GiB of {what}" for n, bound, what in memory)
        log.log(NOTICE, "about %s on %s, %s", minutes(found.total_seconds), self.device, told)
        if any(n > bound for n, bound, _ in memory):
            log.warning("the largest tensors of this model may take more than the bound on memory")
        return found

    def _text(self, model: StreamedModel) -> Text:
        """How much text is calibrated on, and whether that is done already."""
        if self.calibration is not None:
            source = self.calibration.metadata["source"]
            return Text(int(source["fit_windows"]), int(source.get("seq_len", self.options.seq_len)), True)
        options = self.options
        most = inputs.longest_window(model)
        return Text(options.samples or options.level.samples, min(options.seq_len, most), False)

    def _found_calibration(self) -> TensorFile | None:
        """The calibration that was given, or one that an earlier run left."""
        if self.options.calibration is not None:
            return self._given_calibration(self.options.calibration)
        found = None if self.model is None else undamaged(self._calibration_path)
        if found is None or self.model is None or not self._fits_still(found, self.model):
            return None
        if self._drops_hessians(self.model):
            return found
        whole = all(f"hessian:{key}" in found.names() for key in found.metadata["hessians"])
        return found if whole else None  # the other run did not need them again

    @property
    def _calibration_path(self) -> Path:
        return self.work.path / "calibration.safetensors"

    def _make_calibration(self, model: StreamedModel) -> None:
        with self.stages.stage("calibration text"):
            data = self._waiting(model, self._data(model))
        facts = {
            "version": CALIBRATION_VERSION,
            "checkpoint": self.checkpoint.fingerprint(),
            "seed": self.options.seed,
            "device": self.device.type,
        }
        splits = {"fit": data.fit, "held_out": data.held_out, "report": data.report}
        identity = content_key(**facts, **{n: digest(b) for n, b in splits.items()})
        metadata = {**facts, "identity": identity} | {
            f"{n}_tokens": sum(next(iter(b.values())).numel() for b in batches)
            for n, batches in splits.items()
        }
        consume = self._estimating(identity) if self._drops_hessians(model) else None
        with self.stages.stage("calibration"):
            calibrate_model(
                model,
                data,
                self._calibration_path,
                metadata,
                self.options.seed,
                self.tokens_per_batch,
                consume,
                self.stages.tick,
            )
        self.calibration = TensorFile(self._calibration_path)

    def _waiting(self, model: StreamedModel, data: inputs.Data) -> inputs.Data:
        """The data with as many windows to fit on as may wait before a layer; the first ones are of all datasets."""
        if not data.language:
            return data
        tokens = data.fit[0]["input_ids"].numel()
        kept = self.fitting("calibration", len(data.fit), self._waiting_bytes(model, tokens))
        source = {**data.source, "fit_windows": kept, "found_windows": len(data.fit), "window_tokens": tokens}
        domains = {**data.domains, "fit": data.domains["fit"][:kept]}
        return replace(data, fit=data.fit[:kept], source=source, domains=domains)

    def _waiting_bytes(self, model: StreamedModel, tokens: int) -> int:
        """Of a window of so many tokens before a layer."""
        width = getattr(model.module.config.get_text_config(), "hidden_size", 1)
        return int(4 * WAITING_WIDTHS * width * tokens)

    def _fits_still(self, file: TensorFile, model: StreamedModel) -> bool:
        """Whether a calibration has as many windows as this run would take: another may have had other memory."""
        source = file.metadata["source"]
        if "found_windows" not in source:
            return True
        each = self._waiting_bytes(model, source["window_tokens"])
        return self.fitting("calibration", int(source["found_windows"]), each) == int(source["fit_windows"])

    def _drops_hessians(self, model: StreamedModel) -> bool:
        """Whether the Hessians take too much to be stored and nothing that was asked for needs them again."""
        if self.options.search_limits is not None or self.options.budget.kind == "max_kl":
            return False
        widths = [
            self.units[w].elements // self.units[w].inner_shape[0] for _, _, w in model.linear_modules()
        ]
        return self.may_drop and sum(4 * n * n for n in widths) > HESSIAN_BYTES

    def _estimating(self, identity: str) -> Consumer:
        """What works out the candidates of the tensors behind each Hessian while it is there."""
        allowed = method_families(self.options.formats)
        once = {n for n, u in self.units.items() if u.lead == 1 and len(u.uses) == 1 and u.kept is None}

        def consume(known: Gathered, keys: list[str]) -> set[str]:
            self.statistics = Statistics(known, self.device)
            encoder = self._encoder(identity)
            entries = known.metadata["hessians"]
            covered = {k for k in keys if set(entries[k]["weights"]) <= once}
            units = [self.units[w] for k in sorted(covered) for w in entries[k]["weights"]]
            encoder.each(units, lambda u: encoder.candidates(u, allowed), lambda u: None)
            return covered

        return consume

    def _given_calibration(self, path: Path) -> TensorFile:
        if not path.exists():
            raise UsageError(f"the calibration file {path} does not exist: write it with `nstf calibrate`")
        try:
            file = TensorFile(path)
        except CorruptError as error:
            raise CorruptError(
                f"the calibration file {path} is not a calibration file, or a damaged one: write it with `nstf calibrate`"
            ) from error
        if file.metadata.get("version") != CALIBRATION_VERSION:
            raise UsageError(
                f"the calibration file {path} was written by another version of nstf: "
                f"run `nstf calibrate {self.options.model}`"
            )
        if file.metadata.get("checkpoint") != self.checkpoint.fingerprint():
            raise UsageError(
                f"the calibration file {path} belongs to another model: run `nstf calibrate {self.options.model}`"
            )
        return file

    def _data(self, model: StreamedModel) -> inputs.Data:
        options = self.options
        samples = options.samples or options.level.samples
        if options.datasets:
            if len(options.datasets) == 1 and options.datasets[0].endswith(".safetensors"):
                return inputs.tensor_data(Path(options.datasets[0]))
            return inputs.text_data(
                model, self.tokenizer(), options.datasets, samples, options.seq_len, options.seed
            )
        if model.is_causal_lm:
            try:
                log.info(
                    "no dataset: calibrating on documentation, code and prose that ship with Python and nstf"
                )
                return inputs.mixed_data(model, self.tokenizer(), samples, options.seq_len, options.seed)
            except UsageError as error:
                log.warning("%s: the model writes its own calibration text", error)
                sampled = min(samples, MOST_SAMPLED)
                start = self._start_token(model)
                return inputs.sampled_data(model, sampled, options.seq_len, options.seed, start)
        if getattr(model.module, "main_input_name", "") == "input_ids":
            return inputs.documentation_data(model, self.tokenizer(), samples, options.seed)
        return inputs.noise_data(model, min(samples, 32), options.seed)

    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises UsageError when there is none."""
        from nstf.runtime.loading import tokenizer_from_files

        try:
            return tokenizer_from_files(self.checkpoint.files(), self.options.model)
        except UnsupportedError as error:
            raise UsageError(
                f"{self.options.model} has no usable tokenizer ({error}): put its tokenizer.json beside the weights"
            ) from error

    def _start_token(self, model: StreamedModel) -> int:
        config = model.module.config.get_text_config()
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(config, name, None)
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int):
                return token
        return 0


def _config(checkpoint: Any) -> dict[str, Any] | None:
    """The config of the model the tensors' names belong to."""
    if checkpoint.config is None:
        return None
    if checkpoint.architecture is not None:
        return {**checkpoint.config, "architectures": [checkpoint.architecture]}
    return dict(checkpoint.config)


def minutes(seconds: float) -> str:
    """`40 s`, `12 min`, `2 h 5 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    whole = round(seconds / 60)
    return f"{whole} min" if whole < 90 else f"{whole // 60} h {whole % 60} min"


def _file_digest(path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"the calibration file {path} does not exist: write it with `nstf calibrate`")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

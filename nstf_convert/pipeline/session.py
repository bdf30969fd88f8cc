"""Everything a conversion works with, opened once: checkpoint, model, work directory, calibration, units."""

import gc
import logging
import math
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError
from nstf.kernels.formats import trellis
from nstf.kernels.trellis_encode import warm_up
from nstf.runtime.imports import uncollected
from nstf.runtime.torch_state import usual_process, usual_thread
from nstf_convert import processes
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.checkpoint.storable import check_storable
from nstf_convert.inputs import keep_apart
from nstf_convert.made_up import longest_window
from nstf_convert.notice import NOTICE
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline.calibrate import make as calibrations
from nstf_convert.pipeline.calibrate.batches import domains, held_out_batches
from nstf_convert.pipeline.calibrate.one_input import one_input
from nstf_convert.pipeline.calibrate.text import Data
from nstf_convert.pipeline.helpers import Helpers, count_beside
from nstf_convert.pipeline.job import Job
from nstf_convert.pipeline.machine import Machine, machine
from nstf_convert.pipeline.prediction import Prediction, Text, predict
from nstf_convert.pipeline.products import rounding
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose.encoder import Encoder
from nstf_convert.pipeline.propose.methods import method_families, reach
from nstf_convert.pipeline.propose.recipe import Recipe, trellis_rates
from nstf_convert.pipeline.propose.units import Statistics, Unit, find_units
from nstf_convert.pipeline.store.tensorfile import TensorFile, TensorFileWriter
from nstf_convert.pipeline.store.workdir import Store, WorkDir, content_key, undamaged
from nstf_convert.streamed import StreamedModel

log = logging.getLogger("nstf")

# Models up to this size are expanded to float32 in the work directory once, instead of at every use.
EXPAND_BYTES = 4 << 30
# Tokens of a window where they are not stated.
SEQ_LEN = next(field.default for field in fields(ConvertOptions) if field.name == "seq_len")
# The same command cannot succeed after one of these.
INPUT_ERRORS = (UsageError, CorruptError, UnsupportedError)


class Session:
    """An opened conversion. Use as a context manager; closing releases the work directory."""

    def __init__(
        self,
        options: ConvertOptions,
        stages: Stages,
        only_calibrates: bool = False,
        given: Machine | None = None,
        check: Callable[["Session"], None] | None = None,
        any_size: bool = False,
    ) -> None:
        """any_size: plans of other sizes than the budget's are wanted.
        only_calibrates: nothing is converted, and all Hessians are kept, where large ones are else used while they are
        there and not stored. given: what a helper's process may use,
        as the first process found it (nstf_convert.pipeline.helpers); it opens the model only, until `join`. check: is
        called once the model is open, before anything is written or takes long."""
        self._begun = time.perf_counter()
        self.helper = given is not None
        self.only_calibrates, self.any_size = only_calibrates, any_size
        self.options = options
        self.windows: dict[str, int] = {}
        self._said_fewer_tokens = False
        self.stages = stages
        self.machine = given or machine(options.device, options.memory, options.gpu_memory, options.threads)
        self._folder = options.work_dir or options.output.with_name(options.output.name + ".work")
        self._made_folder = False
        self._opened = ExitStack()
        self._opened.enter_context(usual_process())  # first of all: what another thread has set goes before
        self._opened.callback(torch.set_num_threads, torch.get_num_threads())
        self._opened.callback(stages.close)
        torch.set_num_threads(self.threads)
        self._opened.enter_context(usual_thread())
        self._compiled: set[int] = set()
        self._compiler: subprocess.Popen[bytes] | None = None
        # The order in which linear modules run, and which write to the residual stream (improve.groups).
        self.probed: tuple[list[nn.Module], dict[str, str]] | None = None
        self.prediction: Prediction | None = None
        # Whether a file's layout was shown to what reads it (allocate.plan).
        self.layout_checked = False
        # What is calibrated on, where the prediction has read it before.
        self.data: Data | None = None
        try:
            self.helpers = Helpers(options, self._folder, self.machine)
            self._opened.callback(self.helpers.close)
            if not self.helper:
                self.compile_ahead()
            self._open_model()
            if check is not None:
                check(self)
            if not self.helper:
                self._open_work()
                self._calibrate()
        except BaseException as error:
            self._close(type(error), error)
            raise

    def _open_model(self) -> None:
        with self.stages.stage("open"), uncollected():
            self.checkpoint = self._opened.enter_context(closing(open_checkpoint(self.options.model)))
            self.job = Job(self.options, self.checkpoint)
            check_storable(self.checkpoint)
            if not self.helper:
                self.checkpoint.say_notes(self.options.model)
            self._help_beside()
            self.config = _config(self.checkpoint)
            self.model_reason: str | None = None
            self.model = self._build_model()
            # What was imported stays: until the end no garbage is looked for among it. Who froze objects keeps them frozen.
            if not gc.get_freeze_count():
                self._opened.callback(gc.unfreeze)
                gc.freeze()

    def _help_beside(self) -> None:
        """Starts helpers on the same GPU, before this process spends its time on imports. What keeps all Hessians makes no
        candidates."""
        count = (
            0
            if self.helper or self.only_calibrates
            else count_beside(self.machine, self.checkpoint.total_bytes)
        )
        self.beside = Helpers(self.options, self._folder, self.machine, count, self.any_size)
        self._opened.callback(self.beside.close)

    def _open_work(self) -> None:
        new = not self._folder.exists()
        self.work = self._opened.enter_context(self._work_dir())
        self._made_folder = new
        self._opened.callback(self.helpers.close)  # before the lock goes
        self._opened.callback(self.beside.close)
        self.source = self._expanded()
        self.units = self.found_units()
        self.calibration: TensorFile | None = None
        self.statistics = Statistics(None, self.device)
        self.encoder = self.encoder_for("none")

    def _calibrate(self) -> None:
        self._say_unused()
        self.calibration = calibrations.find(self)
        if self.calibration is not None:
            self.work.drop_pieces()  # of the run that made it, if that was killed before it could
        self.prediction = self._predict()
        self.beside.rehearse()
        if self.calibration is None and self.model is not None:
            self.calibration = calibrations.make(self, self.model)
        self.data = None
        self._use_calibration()

    def _say_unused(self) -> None:
        """A calibration that is given has its text already: what would shape one that is made here is not silently lost."""
        options = self.options
        texts = options.datasets and not (options.heals or options.plans_attention)
        asked = {
            "datasets": texts,
            "samples": options.samples is not None,
            "seq_len": options.seq_len != SEQ_LEN,
        }
        if options.calibration is not None and (
            unused := [f"`{name}`" for name, set_ in asked.items() if set_]
        ):
            log.warning("no effect of %s: the calibration that is given has its own text", ", ".join(unused))

    def _use_calibration(self) -> None:
        self.statistics = Statistics(self.calibration, self.device)
        self.encoder = self.encoder_for(self.calibration_fingerprint())

    def join(self) -> None:
        """In a helper's process: opens the work directory, which the first process has locked."""
        self._open_work()

    def share_calibration(self) -> None:
        """In a helper's process: takes the calibration that the first process has found or made. Raises NstfError when there
        is none for a model that can be run."""
        if self.calibration is None and self.model is not None:
            self.calibration = calibrations.find_shared(self)
            if self.calibration is None:
                raise NstfError("there is no calibration to share")
            self._use_calibration()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(kind, error)

    def _close(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        """Releases everything. A work directory of our own goes when nothing can resume it: after success, and
        after a mistake in the input, whose correction makes it another session.

        Raises UsageError in the place of an error that is none of ours where the checkpoint was written into: it may have
        held anything when it was read.
        """
        if not self.helper and getattr(self, "calibration", None) is not None:
            self.helpers.close()
            self.beside.close()
            self.work.drop_pieces()
        useless = kind is None or (self._made_folder and issubclass(kind, INPUT_ERRORS))
        ours = not self.helper and hasattr(self, "work")
        if useless and self.options.work_dir is None and ours:
            self.work.useless = True
        try:
            if ours and self.job.written_into():
                log.warning(
                    "%s was written into meanwhile: what was made of it is removed from %s",
                    self.options.model, self._folder,
                )  # fmt: skip
                self.helpers.close()
                self.beside.close()
                self.work.discard_new()
                if isinstance(error, Exception) and not isinstance(error, NstfError):
                    raise self.job.changed() from error
        finally:
            self._opened.close()

    @property
    def threads(self) -> int:
        """Threads of the CPU."""
        return self.machine.threads

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        return self.machine.device

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of one forward call: so few that the layers' inputs, kept for a backward pass, fit the bound."""
        most = self.machine.tokens_per_batch
        if self.model is None or not self.model.is_causal_lm:
            return most
        config = self.model.module.config.get_text_config()
        each = 4 * getattr(config, "hidden_size", 1) * getattr(config, "num_hidden_layers", 1)
        fits = max(1, min(most, self.machine.activation_bytes // each))
        if fits < most and self.machine.short and not self._said_fewer_tokens:
            self._said_fewer_tokens = True
            log.warning(
                "%d tokens at a time fit %.1f GiB of waiting activations, less than there is room for usually: sums are "
                "taken in another order than with more memory, and the file may differ",
                fits, self.machine.activation_bytes / 2**30,
            )  # fmt: skip
        return fits

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

    def compile_ahead(self) -> None:
        """Kernels for a GPU are compiled by another process while the model is opened, if there is memory for one."""
        if self.machine.on_gpu and (workers := self.machine.compilers):
            self._compiler = processes.compiler(str(self.device), workers)
            if self._compiler is not None:
                self._opened.callback(self._compiler.wait)
                self._opened.callback(self._compiler.kill)

    def compile_for(self, mix: Mapping[str, Recipe]) -> None:
        """On a GPU: the searches that a mix needs are compiled when this returns; what was compiled ahead is loaded."""
        if not self.machine.on_gpu:
            return
        if self._compiler is not None:  # to what it has not come yet may not be needed
            self._compiler.kill()
            self._compiler.wait()
            self._compiler = None
        rates = sorted({q for recipe in mix.values() for q in trellis_rates(recipe)} - self._compiled)
        if rates:
            self._compiled.update(rates)
            with self.stages.stage("compile kernels"):
                try:
                    warm_up(self.device, trellis.codebook, rates, max(1, self.machine.compilers))
                except Exception as error:  # the search itself will say what is wrong
                    log.debug("compiling: %s", error)

    def streamed(self, source: Callable[[str], Tensor], lazy: bool = False) -> StreamedModel:
        """A model of this architecture on the session's device, with weights from `source`.

        Raises UnsupportedError when transformers does not know it.
        """
        if self.config is None:
            raise UnsupportedError("there is no config.json")
        machine = self.machine
        resident = machine.resident_bytes if machine.on_gpu else 0
        held = self.checkpoint.names()
        ties, limits = self.checkpoint.ties, self.checkpoint.limits
        model = StreamedModel(self.config, source, ties, lazy, machine.device, resident, held, limits)
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

    def found_units(self) -> dict[str, Unit]:
        """The checkpoint's tensors, by name."""
        return {u.name: u for u in find_units(self._infos(), self.model)}

    def encoder_for(self, calibration: str, work: Store | None = None) -> Encoder:
        """What encodes the units by the session's statistics, which came from the calibration of that fingerprint. work:
        where its results go, if not to the work directory."""
        identity = content_key(checkpoint=self.checkpoint.fingerprint(), calibration=calibration)
        few = not self.options.level.thorough and self.options.formats is None
        methods = method_families(None)
        few = few and all(reach(methods, u.cols) for u in self.units.values() if u.kept is None)
        timed = self.options.bounds_time
        known = work or self.work, self._at_hand, self.statistics, identity, self.config, self.machine
        return Encoder(*known, few, timed, self._budget_bits())

    def _budget_bits(self) -> float | None:
        """The bits a weight that the budget comes to; None where no size is known before."""
        parameters = sum(u.elements for u in self.units.values())
        size_bytes = self.options.budget.size_bytes(self.checkpoint.total_bytes, parameters)
        return None if size_bytes is None or self.any_size else 8 * size_bytes / max(1, parameters)

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
                model = self.streamed(lambda name: self.source(name), lazy=True)
            except UnsupportedError as error:
                self.model_reason = str(error)
            else:
                if self.checkpoint.architecture is not None:
                    self._check_held(model)
                    return model
                self.model_reason = "its config.json does not describe its tensors"
        log.warning(
            "%s: %s; its tensors are converted without calibration", self.options.model, self.model_reason
        )
        return None

    def _check_held(self, model: StreamedModel) -> None:
        """Says which buffers are missing. Raises UnsupportedError where the checkpoint lacks a parameter of its model."""
        if model.missing_said:
            log.warning("%s %s", self.options.model, model.missing_said)
        for name in model.stored_parameters():
            self.checkpoint.info(name)

    def _work_dir(self) -> WorkDir:
        """The work directory of this job; a helper shares that of the process that started it."""
        options, job = self.options, self.job
        restart = options.restart and not self.helper
        given = [options.model, *options.datasets, options.calibration, options.output]
        keep_apart(self._folder, [*given, *self.checkpoint.paths()])
        job.identify(self.model, self.device)
        return WorkDir(self._folder, job.parts, self.helper, job.names(), restart)

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
        key = f"{path.name} of {self.checkpoint.fingerprint()}"
        if undamaged(path, key=key) is None:
            with self.stages.stage("expand"), TensorFileWriter(path) as writer:
                writer.metadata = {"key": key}
                for name in names:
                    value = self.checkpoint.get(name)
                    writer.add(name, value.to(torch.float32) if value.is_floating_point() else value)
        file = TensorFile(path)
        return file.get

    def _predict(self) -> Prediction | None:
        """Time and memory, for a model that can be run; the first line of a conversion, and its progress bar."""
        if self.model is None:
            return None
        text = self._text(self.model)
        with self.stages.stage("prediction"):
            found = predict(
                list(self.units.values()), self.options, self.machine, self.checkpoint.total_bytes,
                text, calibrations.drops_hessians(self, self.model), self.beside.count,
            )  # fmt: skip
        seconds = {
            stage: value
            for stage, value in found.seconds.items()
            if stage == "calibration" or not self.only_calibrates
        }
        found = replace(found, seconds=seconds, begun=time.perf_counter() - self._begun)
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
        """How much text is calibrated on, and whether that is done already; of a model that is no language model, how many
        inputs."""
        options, file = self.options, self.calibration
        if not calibrations.scored_as_language(self, model):
            return self._inputs(model)
        if file is not None:
            source = file.metadata["source"]
            tokens = int(source.get("seq_len", options.seq_len))
            return Text(int(source["fit_windows"]), tokens, True, reports=bool(domains(file, "report")))
        tokens = min(options.seq_len, longest_window(model))
        return Text(
            options.calibration_windows, tokens, False, options.gradient_windows, options.reports_apart
        )

    def _inputs(self, model: StreamedModel) -> Text:
        """The inputs of a model that is no language model, and what one of them costs."""
        file, read = self.calibration, self.options.gradient_windows
        if file is not None:
            counts = [int(file.metadata[n]) for n in ("fit", "held_out", "report")]
            first = held_out_batches(file)[0]
        else:
            with self.stages.stage("calibration text"):
                data = calibrations.inputs_of(self, model)
            counts, first = [len(b) for b in (data.fit, data.held_out, data.report)], data.held_out[0]
        with self.stages.stage("prediction"):
            cost = one_input(model, first)
        reports = counts[2] > 0 and (file is not None or self.options.reports_apart)
        return Text(counts[0], 1, file is not None, read, reports, counts[1], cost)

    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises UsageError when there is none."""
        from nstf.runtime.tokenizer_files import tokenizer_from_files

        try:
            return tokenizer_from_files(self.checkpoint.files(), self.options.model)
        except UnsupportedError as error:
            raise UsageError(
                f"{self.options.model} has no usable tokenizer ({error}): put its tokenizer.json beside the weights"
            ) from error


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

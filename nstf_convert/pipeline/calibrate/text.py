"""What a model is calibrated and measured on: batches to fit on, held-out batches, and where they came from."""

import logging
import math
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError, out_of_memory
from nstf.runtime.artifact.atomic_file import raise_disk_fault
from nstf.runtime.artifact.header import parse_header
from nstf_convert.checkpoint.paths import check_name, reading
from nstf_convert.dataset import load_text
from nstf_convert.made_up import SPECTROGRAM_BY_TIME, frames, longest_window, made_up_shape
from nstf_convert.streamed import StreamedModel
from nstf_convert.windows import Windows, tokenise_windows

Batch = dict[str, Tensor]
log = logging.getLogger("nstf_convert")

# Held-out windows that choose: 8 x 255 scored tokens give the mean KLD a standard error of about 5 %, differences
# between two mixes on the same windows a far smaller one.
HELD_OUT_WINDOWS = 8
# Held-out windows that report. A mix that was chosen by one set of windows looks better on them than it is.
REPORT_WINDOWS = 8
# Of arrays, each sample of which is a batch: 1.6 KB of Python's memory.
MOST_SAMPLES = 1 << 16
# Share of given inputs that is held out.
HELD_OUT_SHARE = 0.25
# Where inputs can be from: given, what ships with Python and nstf, sampled from the model, Python's manual, 1/f noise.
ORIGINS = ("dataset", "mixed", "model", "documentation", "noise")
# Windows an encoder is calibrated on are shorter: sentences, not documents.
ENCODER_SEQ_LEN = 128
REAL_INPUTS = (
    "give real inputs, a .safetensors file with arrays named like the forward arguments, as the dataset"
)
# Inputs that gradients start at: whole numbers, which some models make floats of, would leave them none.
REAL = ("pixel_values", "input_features", "input_values")
# Code that every CPython has: long modules of different kinds.
CODE_MODULES = (
    "argparse.py", "ast.py", "calendar.py", "collections/__init__.py", "configparser.py", "csv.py", "dataclasses.py",
    "datetime.py", "difflib.py", "email/message.py", "fractions.py", "functools.py", "heapq.py", "http/client.py",
    "inspect.py", "json/decoder.py", "logging/__init__.py", "pathlib.py", "random.py", "statistics.py",
    "subprocess.py", "tarfile.py", "textwrap.py", "threading.py", "typing.py", "unittest/case.py", "zipfile.py",
)  # fmt: skip


@dataclass(frozen=True)
class Data:
    """fit, held_out, report: batches of one window (or one image) each, disjoint. language: scored as a language model.

    Statistics are fitted on `fit`, mixes are chosen by `held_out`, and `report` is what the file is said to lose.
    source: a description for the report; `origin` is `dataset`, `mixed` (what ships with Python and
    nstf), `model` (sampled from it), `documentation` (the
    Python manual that comes with Python) or `noise`. domains: the dataset of every batch, by split. read: how many batches
    of `fit` the backward pass reads (None: all).
    """

    language: bool
    fit: tuple[Batch, ...]
    held_out: tuple[Batch, ...]
    source: dict[str, Any]
    report: tuple[Batch, ...] = ()
    domains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    read: int | None = None

    def __post_init__(self) -> None:
        origin = str(self.source.get("origin", "dataset"))
        given = {n: self.domains.get(n) for n in ("fit", "held_out", "report")}
        filled = {n: d if d is not None else (origin,) * len(getattr(self, n)) for n, d in given.items()}
        object.__setattr__(self, "domains", filled)

    @property
    def to_read(self) -> tuple[Batch, ...]:
        """The batches that the backward pass reads."""
        return self.fit[: self.read]

    def without_report(self) -> "Data":
        """The same without windows that only report: those that choose then do both."""
        domains = {n: d for n, d in self.domains.items() if n != "report"}
        source = {**self.source, "report_windows": 0}
        return replace(self, report=(), source=source, domains={**domains, "report": ()})


def text_data(
    model: StreamedModel, tokenizer: Any, datasets: Sequence[str], samples: int, seq_len: int, seed: int
) -> Data:
    """Windows of the given texts, each text giving an equal share. Raises UsageError when one is too short."""
    sources = {str(path): load_text(path) for path in datasets}
    return _windows(model, tokenizer, sources, samples, seq_len, seed, "dataset")


def _windows(
    model: StreamedModel,
    tokenizer: Any,
    sources: Mapping[str, Iterable[str]],
    samples: int,
    seq_len: int,
    seed: int,
    origin: str,
) -> Data:
    language = model.is_causal_lm
    seq_len = min(seq_len if language else min(seq_len, ENCODER_SEQ_LEN), longest_window(model))
    per_fit = math.ceil(samples / len(sources))
    per_held = math.ceil(HELD_OUT_WINDOWS / len(sources))
    per_report = math.ceil(REPORT_WINDOWS / len(sources))
    parts: dict[str, list[Batch]] = {"fit": [], "held_out": [], "report": []}
    domains: dict[str, list[str]] = {n: [] for n in parts}
    found: dict[str, list[list[tuple[str, Batch]]]] = {n: [] for n in parts}
    for number, (path, documents) in enumerate(sources.items()):
        windows = tokenise_windows(
            tokenizer, documents, seq_len, per_fit, per_held + per_report, seed + number, path
        )
        _check_tokens(model, windows)
        held, report = windows.held_out[:per_held], windows.held_out[per_held:]
        for split, ids in (("fit", windows.fit), ("held_out", held), ("report", report)):
            found[split].append([(readable(Path(path).name), row) for row in _rows(ids)])
    for split, by_source in found.items():
        # In turn: any first part of the windows, and any last part, is of all sources.
        for name, row in (pair for turn in zip(*by_source, strict=True) for pair in turn):
            parts[split].append(row)
            domains[split].append(name)
    source = {
        "origin": origin,
        "datasets": [readable(Path(p).name) for p in sources],
        "seq_len": seq_len,
        **{f"{n}_windows": len(b) for n, b in parts.items()},
    }
    fit, held_out, reported = (tuple(parts[n]) for n in ("fit", "held_out", "report"))
    return Data(language, fit, held_out, source, reported, {n: tuple(d) for n, d in domains.items()})


def mixed_data(model: StreamedModel, tokenizer: Any, samples: int, seq_len: int, seed: int) -> Data:
    """Windows of documentation, code and prose in equal shares, for a language model without a dataset.

    The manual and the code come with every CPython, the prose with this package: no network and no file is needed.
    """
    return _windows(model, tokenizer, own_texts(), samples, seq_len, seed, "mixed")


def own_texts() -> dict[str, list[str]]:
    """What is read where no dataset is given. It changes with Python."""
    return {"documentation": manual(), "code": standard_library(), "prose": prose()}


def documentation_data(model: StreamedModel, tokenizer: Any, samples: int, seed: int) -> Data:
    """Windows of the Python manual, for a text encoder."""
    seq_len = min(ENCODER_SEQ_LEN, longest_window(model))
    windows = tokenise_windows(
        tokenizer, manual(), seq_len, samples, HELD_OUT_WINDOWS + REPORT_WINDOWS, seed, "the Python manual"
    )
    _check_tokens(model, windows)
    rows = _rows(torch.cat([windows.fit, windows.held_out]))
    return _split(model.is_causal_lm, rows, samples, {"origin": "documentation", "seq_len": seq_len})


def manual() -> list[str]:
    """Passages of Python's manual (`pydoc_data.topics`)."""
    try:
        from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]
    except ImportError:  # some systems ship Python without it
        return []
    return [part for name in sorted(topics) for part in topics[name].split("\n\n") if len(part) > 200]


def standard_library() -> list[str]:
    """Modules of Python's standard library, as source code."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [(folder / name).read_text(encoding="utf-8") for name in CODE_MODULES if (folder / name).exists()]


def prose() -> list[str]:
    """Paragraphs of the prose that comes with the package, a few together."""
    text = (Path(__file__).parents[2] / "texts" / "prose.txt").read_text(encoding="utf-8")
    paragraphs = text.split("\n\n")
    return ["\n\n".join(paragraphs[i : i + 8]) for i in range(0, len(paragraphs), 8)]


def tensor_data(path: Path, model: StreamedModel) -> Data:
    """Model inputs stored as arrays: a .safetensors file whose tensors are forward arguments, first axis = sample.

    Floats become float32, whole numbers of other types than int32 int64. Raises UsageError for what is no such file, and for
    arrays that the model does not take: some samples are run.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_name(path)
    try:
        with reading(str(path)):  # the library does not say why a file cannot be opened
            parse_header(path)  # takes no more memory for a header than it has bytes
        arrays = load_file(str(path))  # RuntimeError: torch's, of what it cannot map
    except (SafetensorError, CorruptError, UnsupportedError, OSError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        raise_disk_fault(error, f"read {path}")
        raise UsageError(f"the dataset {path} is not a safetensors file of model inputs ({error})") from error
    counts = {a.shape[0] if a.ndim else 0 for a in arrays.values()}
    if len(counts) != 1 or min(counts) < 4:
        raise UsageError(f"the dataset {path}: every array needs the same first axis of at least 4 samples")
    total = counts.pop()
    if total > MOST_SAMPLES:
        log.warning("of %d samples in %s the first %d are read", total, path, MOST_SAMPLES)
        total = MOST_SAMPLES
    try:
        arrays = {n: _computable(a[:total]) for n, a in arrays.items()}
    except RuntimeError as error:  # a type that torch stores and does not compute with
        if out_of_memory(error):
            raise
        kinds = ", ".join(sorted({str(a.dtype).removeprefix("torch.") for a in arrays.values()}))
        raise UsageError(f"the dataset {path}: its types ({kinds}) are not all computed with") from error
    _check_arrays(path, arrays, model)
    held = max(2, min(HELD_OUT_WINDOWS * 4, round(total * HELD_OUT_SHARE)))
    batches = [{n: a[i : i + 1] for n, a in sorted(arrays.items())} for i in range(total)]
    return _split(False, batches, total - held, {"origin": "dataset", "datasets": [readable(path.name)]})


def _computable(array: Tensor) -> Tensor:
    """An array in a type that models compute with. Tokens are often stored as uint16, of which torch knows no minimum and
    embeddings look nothing up."""
    if array.is_floating_point():
        return array.float()
    usable = array.is_complex() or array.dtype in (torch.bool, torch.int32, torch.int64)
    return array if usable else array.long()


def _check_arrays(path: Path, arrays: Mapping[str, Tensor], model: StreamedModel) -> None:
    for name, array in arrays.items():
        if array.is_complex() or array.numel() == 0 or not bool(array.isfinite().all()):
            raise UsageError(f"the dataset {path}: {name} has to hold finite numbers")
        if name in REAL and not array.is_floating_point():
            raise UsageError(
                f"the dataset {path}: {name} holds whole numbers: store what the model's processor makes of them"
            )
        count = tokens_of(model) if name == "input_ids" else None
        if count is not None and not 0 <= int(array.min()) <= int(array.max()) < count:
            raise UsageError(f"the dataset {path}: {name} has tokens outside the model's {count}")
    # Several together, as later: the first ones, and those with the least and the largest numbers that may look things up.
    whole = (
        a.reshape(len(a), -1) for a in arrays.values() if not a.is_floating_point() and a.dtype != torch.bool
    )
    ends = (int(i) for a in whole for i in (a.amin(1).argmin(), a.amax(1).argmax()))
    rows = sorted({0, 1, *ends})
    try:
        with torch.no_grad():
            out = model.outputs(**{name: array[rows] for name, array in arrays.items()})
    except NstfError:  # of the checkpoint, whose weights are read here
        raise
    except Exception as error:  # whatever a model's own code says of inputs that are not its own
        if out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"the dataset {path} is not what the model takes: {reason}") from error
    if not bool(out.isfinite().all()):
        raise UsageError(f"the dataset {path}: the model's outputs for its samples are not finite")


def noise_data(model: StreamedModel, samples: int, seed: int) -> Data:
    """Images, films or spectrograms of 1/f noise for a model that takes `pixel_values`, `input_features` or AST's values.

    Natural signals have a power spectrum near 1/f^2, so their second moments are close to those of this noise;
    real inputs (a .safetensors file as the dataset) are better, and the report says which were used.
    """
    name, shape = input_shape(model)
    generator = torch.Generator().manual_seed(seed)
    total = samples + HELD_OUT_WINDOWS + REPORT_WINDOWS
    spatial = shape[-2:] if len(shape) > 2 else shape[1:]  # every image of a film has its own
    frequency = torch.zeros(spatial)
    for axis, size in enumerate(spatial):
        f = torch.fft.fftfreq(size).abs().reshape([-1 if a == axis else 1 for a in range(len(spatial))])
        frequency = frequency + f.square()
    amplitude = 1.0 / frequency.sqrt().clamp_min(1.0 / max(spatial))
    axes = tuple(range(-len(spatial), 0))
    batches = []
    for _ in range(total):
        white = torch.randn(shape, generator=generator)
        image = torch.fft.ifftn(torch.fft.fftn(white, dim=axes) * amplitude, dim=axes).real
        batches.append({name: ((image - image.mean()) / image.std().clamp_min(1e-6))[None].to(torch.float32)})
    return _split(False, batches, samples, {"origin": "noise", "input": name})


def sampled_data(model: StreamedModel, samples: int, seq_len: int, seed: int, start: int) -> Data:
    """Windows a language model wrote itself, at temperature 1 from its start token; the last ones are held out."""
    from nstf_convert.pipeline.calibrate.sampled_text import sample_windows

    held = HELD_OUT_WINDOWS + REPORT_WINDOWS
    seq_len = min(seq_len, longest_window(model))
    windows = sample_windows(model, samples + held, seq_len, seed, start)
    return _split(True, _rows(windows), samples, {"origin": "model", "seq_len": seq_len})


def _rows(windows: Tensor) -> list[Batch]:
    """A batch for every row of token ids [n, tokens]."""
    return [{"input_ids": row[None].clone()} for row in windows]


def _split(language: bool, batches: Sequence[Batch], fit: int, source: dict[str, Any]) -> Data:
    """The first `fit` batches are fitted on; of the rest the first half chooses and the other half reports."""
    middle = fit + (len(batches) - fit + 1) // 2
    parts = tuple(batches[:fit]), tuple(batches[fit:middle]), tuple(batches[middle:])
    counts = dict(zip(("fit_windows", "held_out_windows", "report_windows"), map(len, parts), strict=True))
    label = str((source.get("datasets") or [source["origin"]])[0])
    domains = {n: (label,) * len(p) for n, p in zip(("fit", "held_out", "report"), parts, strict=True)}
    return Data(language, parts[0], parts[1], {**source, **counts}, parts[2], domains)


def tokens_of(model: StreamedModel) -> int | None:
    """How many tokens the model has an embedding of, or None where it has no table or does not say which (CLIP)."""
    get = getattr(model.module, "get_input_embeddings", None)
    try:
        table = get() if get is not None else None
    except NotImplementedError:
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def _check_tokens(model: StreamedModel, windows: Windows) -> None:
    """Raises UnsupportedError for tokens that the model has no embedding of: some were added to its tokenizer alone."""
    count, found = tokens_of(model), torch.cat([windows.fit, windows.held_out])
    if count is not None and (highest := int(found.max())) >= count:
        raise UnsupportedError(
            f"the tokenizer makes token {highest}, beyond the model's vocabulary of {count}; take the model's own"
        )


def input_shape(model: StreamedModel) -> tuple[str, tuple[int, ...]]:
    """(name, shape of one) of the images, films or spectrograms that a model reads, by its config. Raises UsageError."""
    config = model.module.config
    name = getattr(model.module, "main_input_name", "")
    if name == "pixel_values":
        first = frames(config.to_dict())
        config = getattr(config, "vision_config", config)
        size = getattr(config, "image_size", 224)
        sizes = (size, size) if isinstance(size, int) else tuple(size)
        return name, made_up_shape((*first, getattr(config, "num_channels", 3), *sizes))
    if name == "input_values" and config.model_type == SPECTROGRAM_BY_TIME:
        return name, made_up_shape((config.max_length, config.num_mel_bins))
    if name == "input_features" and hasattr(config, "num_mel_bins"):
        bands, positions = made_up_shape((config.num_mel_bins, getattr(config, "max_source_positions", 1500)))
        return name, made_up_shape((bands, 2 * positions))
    raise UsageError(
        f"{type(model.module).__name__} takes {name or 'inputs of an unknown kind'}, which cannot be made up: {REAL_INPUTS}"
    )


def readable(name: str) -> str:
    """A file's name as text that can be written anywhere: it goes into the artifact."""
    return name.encode("utf-8", "backslashreplace").decode()

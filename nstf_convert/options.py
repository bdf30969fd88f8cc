"""What a user asks of a conversion, and what comes back. The command line is made from the fields here."""

import re
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from nstf.errors import UsageError
from nstf.runtime.artifact.header import short
from nstf_convert.budget import Budget
from nstf_convert.checkpoint.paths import check_path, expanded
from nstf_convert.keywords import ConvertKeywords


@dataclass(frozen=True)
class Effort:
    """What one word stands for.

    samples: calibration windows, of `seq_len` tokens; gradient_samples: how many of them the backward pass reads (None: all;
    with fewer, tokens are not weighted); thorough: every format is proposed, single formats are compared on a few layers,
    and the windows that choose do not report (otherwise only formats that may win, compared by expected losses);
    front_to_back: each layer is encoded for what its compressed predecessors give it; search_steps: moves of the local
    search; attention_plan: whether one is measured; every_family: the best single format of every family takes all last
    steps to the end (otherwise those that may win, for as long as they may).
    """

    samples: int
    gradient_samples: int | None
    thorough: bool
    front_to_back: bool
    search_steps: int
    attention_plan: bool
    every_family: bool = False


# `1.5`, `1.5x`, `300tok/s`, `300 tokens/s`.
_SPEED = re.compile(r"(\d+(?:\.\d*)?|\.\d+)x?(\s*(?:t|tok|tokens)/s)?", re.ASCII)

EFFORTS = {
    "fast": Effort(16, 4, thorough=False, front_to_back=False, search_steps=0, attention_plan=False),
    "balanced": Effort(64, None, thorough=True, front_to_back=True, search_steps=0, attention_plan=False),
    "best": Effort(
        64, None, thorough=True, front_to_back=True, search_steps=6, attention_plan=True, every_family=True
    ),
}


def option(default: Any, help: str, group: str = "", flag: str = "", **limits: Any) -> Any:
    """A field of ConvertOptions that the command line offers.

    help, group: as `--help` shows them; flag: the option's name where it is not the field's; limits: min, max, metavar.
    """
    metadata = {"help": help, "group": group, "flag": flag, **limits}
    return field(default=default, metadata=metadata)


ADVANCED = "Single switches (what --effort sets, and more)"
MACHINE = "Machine"
CALIBRATION = "Calibration"
CACHE = "KV cache"
SPEED = "Speed"
# What a file is made for: its bytes alone, bytes and time, or time.
PREFERENCES = ("balance", "size", "speed")


# Besides what ConvertKeywords says: what the fields are made of before it is turned into that.
_ALSO: dict[str, tuple[type, ...]] = {
    "min_speed": (int, float),
    "target": (list,),
    "formats": (list,),
    "tp": (list, int),
}


def _check_types(options: "ConvertOptions") -> None:
    """Raises UsageError for a value of another type than its field's; `True` is no number."""
    for name, hint in get_type_hints(ConvertKeywords).items():
        value = getattr(options, name)
        kinds = tuple(get_origin(k) or k for k in (get_args(hint) or (hint,)) if k is not type(None))
        kinds += (
            _ALSO.get(name, ()) + ((int,) if float in kinds else ()) + ((PathLike,) if Path in kinds else ())
        )
        right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if name in ("target", "formats") and isinstance(value, tuple | list):
            right = all(isinstance(word, str) for word in value)
        if not right and not (value is None and type(None) in get_args(hint)):
            words = str(getattr(hint, "__name__", hint)).replace("pathlib.", "").replace(" | None", "")
            raise UsageError(f"`{name}` is {short(value, 40)}, expected {words}")
        if isinstance(value, int) and value.bit_length() > 63:
            raise UsageError(f"`{name}` cannot be {short(value)}: that is more than there can be of anything")


@dataclass(frozen=True)
class ConvertOptions:
    """One conversion. None: the effort decides, or the machine.

    Memory is in bytes, times in minutes. signatures: the report describes every tensor
    (nstf.analyzers.signatures), which costs a singular value decomposition each, and decides nothing; the command line
    asks for them with a report.
    """

    model: str
    output: Path
    budget: Budget
    datasets: tuple[str, ...] = option(
        (),
        "Text for calibration: .txt, .jsonl, .parquet, a folder of these or a hub name; may be repeated. Without it "
        "documentation, code and prose that ship with Python and nstf are used.",
        CALIBRATION,
        "--dataset",
    )
    calibration: Path | None = option(None, "A file written by `nstf calibrate`.", CALIBRATION)
    samples: int | None = option(None, "Calibration windows.", CALIBRATION, min=1)
    seq_len: int = option(512, "Tokens of a window.", CALIBRATION, min=8, max=1 << 20)
    seed: int = option(0, "Seed of everything random.", CALIBRATION, min=0, max=2**32 - 1)
    effort: str = option("balanced", "fast, balanced or best: time spent for a smaller loss.")
    target: tuple[str, ...] | None = option(
        None,
        "Where the file will run: cpu, avx2, avx512, neon, sm_90, gfx942 and so on, or several with commas between; this "
        "machine by default.",
        SPEED,
        metavar="NAMES",
    )
    prefer: str = option(
        "balance",
        "balance: the least loss at no less than 0.9 of the speed of an int or grid file of this size; size: the least "
        "loss, whatever the speed; speed: as fast as can be while it loses no more than one int or grid format. With --for, "
        "balance is size unless --target or --min-speed is given.",
        SPEED,
    )
    min_speed: str | None = option(
        None, "Decode at least this fast: 1.5 (times the fastest single format at these bytes) or 300tok/s.", SPEED,
        metavar="SPEED",
    )  # fmt: skip
    image_size: int | None = option(
        None, "Where time counts: height and width of the images that the file will read; the dataset's by default.",
        SPEED, min=1, max=1 << 14, metavar="PIXELS",
    )  # fmt: skip
    tp: tuple[int, ...] | None = option(
        None,
        "Only what so many ranks can each hold a part of, for tensor parallelism: 2,4,8.",
        SPEED,
        metavar="N,...",
    )
    device: str = option(
        "auto",
        "Where to work: auto (a GPU if there is one), cpu, cuda, cuda:1, or several GPUs: cuda:0,1.",
        MACHINE,
    )
    memory: int | None = option(
        None,
        "Host memory to stay within, such as 6GiB; by default three quarters of what is free. On a CPU a stated bound "
        "also decides how many windows of text wait in memory.",
        MACHINE,
        metavar="SIZE",
    )  # fmt: skip
    gpu_memory: int | None = option(
        None, "Memory of each GPU to stay within; by default three quarters of what is free.", MACHINE,
        metavar="SIZE",
    )  # fmt: skip
    threads: int | None = option(None, "CPU threads; all cores by default.", MACHINE, min=1, max=1024)
    work_dir: Path | None = option(None, "Where intermediate results are kept for a resume.", MACHINE)
    formats: tuple[str, ...] | None = option(
        None,
        "Only these methods, separated by commas: int, grid, fp8, mxfp4, trellis, shuffle, low_rank, cp, tucker, "
        "tensor_train, add (a low rank on low bits); any file of quantizers/ or decomposers/. Without it all (with --prefer "
        "size all but shuffle).",
        ADVANCED,
        metavar="LIST",
    )
    engine: str | None = option(
        None,
        "Only what nstf export --to this keeps exactly: gguf, compressed-tensors or onnx. The budget counts the .nstf file; "
        "tensors take the same bytes there. Speeds here count only if --target, --min-speed or --prefer speed is given.",
        "",
        "--for",
        metavar="ENGINE",
    )
    prefix: bool | None = option(
        None, "Encode front to back, each layer for what its compressed predecessors give it.", ADVANCED
    )
    search: bool | None = option(None, "Improve the mix by measured local search.", ADVANCED)
    search_minutes: float | None = option(
        None, "Time for the local search; where it stops then depends on the machine.", ADVANCED, "--search-time",
        min=0.0, max=1e6, metavar="MINUTES",
    )  # fmt: skip
    search_steps: int | None = option(
        None, "Moves of the local search: the same file on every machine.", ADVANCED, min=0, metavar="N"
    )
    heal_minutes: float = option(
        0.0, "Tune scales, norms, biases and factors against the original's logits for about this long.",
        ADVANCED, "--heal", min=0.0, max=1e6, metavar="MINUTES",
    )  # fmt: skip
    heal_steps: int | None = option(
        None, "Heal for so many steps: on a CPU the same file every time.", ADVANCED, min=1, metavar="N"
    )
    attention_plan: bool | None = option(
        None,
        "Plan the KV cache and which heads attend sparsely; --kv-budget and --kv-max-kl imply it.",
        ADVANCED,
    )
    kv_budget: float | None = option(
        None, "Bytes of the KV cache, as a share of a dense one of 16 bits at the context's length: 0.4.", CACHE,
        min=0.001, max=1.0, metavar="SHARE",
    )  # fmt: skip
    kv_max_kl: float | None = option(
        None,
        "Nats per token that the planned cache and sparse heads may cost on another text; the smallest cache that holds it.",
        CACHE, min=0.0, max=1e6, metavar="NATS",
    )  # fmt: skip
    context: int | None = option(
        None,
        "Tokens of a context that attention is planned for: 8192.",
        CACHE,
        min=256,
        max=1 << 26,
        metavar="N",
    )
    fuse: bool = option(False, "One format for q/k/v and for gate/up, as fused kernels ask.", ADVANCED)
    signatures: bool = False
    force: bool = option(False, "Overwrite the output.", "", "--force/-f")
    restart: bool = option(
        False, "Discard what an interrupted run with other settings left, and begin anew.", MACHINE
    )

    def __post_init__(self) -> None:
        _check_types(self)
        if self.effort not in EFFORTS:
            raise UsageError(
                f"the effort {str(self.effort)[:40]!r} is not known: choose {', '.join(EFFORTS)}"
            )
        if self.prefer not in PREFERENCES:
            raise UsageError(
                f"the preference {str(self.prefer)[:40]!r} is not known: choose {', '.join(PREFERENCES)}"
            )
        if isinstance(self.target, str):
            names = (name.strip() for name in self.target.split(","))
            object.__setattr__(self, "target", tuple(name for name in names if name))
        if self.target is not None:
            from nstf_convert.speed import targets

            targets.check(self.target)
        if self.tp is not None:
            object.__setattr__(self, "tp", _ranks(self.tp))
        _ = self.speed_asked  # raises for what is no speed
        if self.attention_plan is False and (self.kv_budget, self.kv_max_kl) != (None, None):
            raise UsageError(
                "`kv_budget` and `kv_max_kl` need an attention plan: leave `attention_plan=False` out"
            )
        if self.attention_plan is False and self.context is not None:
            raise UsageError("`context` is for an attention plan: leave it or `attention_plan=False` out")
        for name in ("output", "work_dir", "calibration"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, expanded(getattr(self, name)))
        # Once, for all who read them: hub names, and paths as they were written, stay.
        texts = (str(expanded(name)) if str(name)[:1] in ("~", "") else name for name in self.datasets)
        object.__setattr__(self, "datasets", tuple(texts))
        work = f"{self.output}.work" if self.output is not None and self.work_dir is None else self.work_dir
        for path in (self.output, *self.datasets, work, self.calibration):
            if path is not None:
                check_path(path)
        if isinstance(self.formats, str):
            object.__setattr__(self, "formats", tuple(n.strip() for n in self.formats.split(",")))
        if self.engine is not None:
            from nstf_convert.export import engines

            own = (engines.MARK + self.engine,)
            engines.methods(self.engine)  # raises for an unknown one
            if self.formats not in (None, own):
                raise UsageError("`engine` decides the formats: leave `formats` out")
            object.__setattr__(self, "formats", own)
            # vLLM multiplies q, k and v as one matrix, of one scheme.
            object.__setattr__(self, "fuse", self.fuse or self.engine == "compressed-tensors")
            # How fast formats are here says nothing about another engine, unless the user asks for speed here.
            if self.prefer == "balance" and self.target is None and self.min_speed is None:
                object.__setattr__(self, "prefer", "size")
        for known in fields(self):
            value, meta = getattr(self, known.name), known.metadata
            if not isinstance(value, int | float):
                continue
            low, high = meta.get("min", value), meta.get("max", value)
            if not low <= value <= high:
                bound = f"at most {high}" if value > high else f"at least {low}"
                raise UsageError(f"`{known.name}` cannot be {value}: it must be {bound}")
        for name in ("memory", "gpu_memory"):
            if not isinstance(getattr(self, name), int | None):
                raise UsageError(f"{name} is a number of bytes, such as 6 << 30, not {getattr(self, name)!r}")

    @property
    def level(self) -> Effort:
        """What the effort stands for."""
        return EFFORTS[self.effort]

    @property
    def calibration_windows(self) -> int:
        """Windows that are fitted on."""
        return self.samples or self.level.samples

    @property
    def gradient_windows(self) -> int:
        """How many of these the backward pass reads: as large a share of any number of windows."""
        level = self.level
        if level.gradient_samples is None:
            return self.calibration_windows
        return max(1, -(-self.calibration_windows * level.gradient_samples // level.samples))

    @property
    def reports_apart(self) -> bool:
        """Whether the windows that choose do not report: where they only choose between two files, they may."""
        chooses_often = self.budget.kind == "max_kl" or self.search_limits is not None or self.heals
        return self.level.thorough or chooses_often

    @property
    def front_to_back(self) -> bool:
        return self.level.front_to_back if self.prefix is None else self.prefix

    @property
    def plans_attention(self) -> bool:
        if self.attention_plan is not None:
            return self.attention_plan
        asked = any(v is not None for v in (self.kv_budget, self.kv_max_kl, self.context))
        return asked or self.level.attention_plan

    @property
    def search_limits(self) -> tuple[float | None, int | None] | None:
        """(minutes, moves) that the search may take, or None when there is none."""
        given = self.search_minutes is not None or self.search_steps is not None
        wanted = self.search if self.search is not None else given or self.level.search_steps > 0
        if not wanted or self.search_minutes == 0.0 or self.search_steps == 0:
            return None
        if given:
            return self.search_minutes, self.search_steps
        return None, self.level.search_steps or EFFORTS["best"].search_steps

    @property
    def bounds_time(self) -> bool:
        """Whether the plan has a bound on time."""
        return self.prefer != "size" or self.min_speed is not None

    @property
    def speed_asked(self) -> tuple[str, float] | None:
        """(`times` or `rate`, number) of the least speed asked for: times the fastest single format, or tokens a second.
        Raises UsageError for what is neither."""
        if self.min_speed is None:
            return None
        found = _SPEED.fullmatch(str(self.min_speed).strip())
        value = float(found.group(1)) if found else 0.0
        if found is None or not 0.0 < value < 1e9:
            raise UsageError(
                f"`min_speed` {str(self.min_speed)[:40]!r} is no speed: "
                "write 1.5 (times the fastest single format) or 300tok/s"
            )
        return ("rate" if found.group(2) else "times"), value

    @property
    def heals(self) -> bool:
        return self.heal_minutes > 0.0 or bool(self.heal_steps)


def _ranks(stated: Any) -> tuple[int, ...]:
    """Numbers of ranks, from `2,4,8` too. Raises UsageError."""
    words = stated.split(",") if isinstance(stated, str) else stated
    whole = isinstance(words, tuple | list) and all(isinstance(w, str) or type(w) is int for w in words)
    try:
        found = tuple(sorted({int(word) for word in words})) if whole else ()
    except ValueError:
        found = ()
    if not found or found[0] < 2 or found[-1] > 1024:
        raise UsageError(f"`tp` {short(stated, 40)}: give numbers of ranks from 2 to 1024, such as 2,4,8")
    return found


@dataclass(frozen=True)
class ConvertResult:
    """The file that was written and the report about it (nstf_convert.report.build describes its fields)."""

    output: Path
    size_bytes: int
    budget_bytes: int | None
    report: dict[str, Any]

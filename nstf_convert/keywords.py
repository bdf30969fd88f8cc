"""The keywords of `nstf.convert`, for type checkers: one for each field of ConvertOptions (a test compares them)."""

from pathlib import Path
from typing import TypedDict


class ConvertKeywords(TypedDict, total=False):
    """See nstf_convert.options.ConvertOptions, whose fields say what each does. Sizes in bytes, times in minutes."""

    calibration: Path | str | None
    samples: int | None
    seq_len: int
    seed: int
    effort: str
    target: tuple[str, ...] | str | None
    prefer: str
    min_speed: str | None
    image_size: int | None
    tp: tuple[int, ...] | str | None
    device: str
    memory: int | None
    gpu_memory: int | None
    threads: int | None
    work_dir: Path | str | None
    formats: tuple[str, ...] | str | None
    engine: str | None
    prefix: bool | None
    search: bool | None
    search_minutes: float | None
    search_steps: int | None
    heal_minutes: float
    heal_steps: int | None
    attention_plan: bool | None
    kv_budget: float | None
    kv_max_kl: float | None
    context: int | None
    fuse: bool
    signatures: bool
    force: bool
    restart: bool

"""Coverage-guided fuzzing of what reads a stranger's file, with atheris (libFuzzer over Python's coverage). As a program:

    python tests/attacks/guided.py TARGET [libFuzzer's options]

TARGET: manifest, safetensors, gguf, onnx, config. A crash is any error that is not ours; libFuzzer's -timeout and
-rss_limit_mb catch hangs and growth. Without a folder of a corpus it begins with the seeds below.
"""

import importlib
import inspect
import json
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

MODULES = {
    "manifest": ("nstf.runtime.artifact.header", "nstf.runtime.artifact.manifest", "nstf.runtime.artifact.reader",
                 "nstf.kernels.formats"),
    "safetensors": ("nstf.runtime.artifact.header",),
    "gguf": ("nstf_convert.checkpoint.gguf_check",),
    "onnx": ("nstf_convert.checkpoint.onnx_wire",),
    "config": ("nstf.runtime.artifact.config",),
}  # fmt: skip


def manifest_seeds() -> list[bytes]:
    """Headers with the digest of themselves zeroed: the target makes it right."""
    from parse_cases import golden_bases, whole

    return [whole(base.manifest, base.arrays) for base in golden_bases()]


def run_manifest(data: bytes) -> None:
    """The size of the file is taken from the offsets, so that what comes after them is reached."""
    from parse_cases import outcome, seal

    ends = [0]
    try:
        for name, entry in json.loads(data).items():
            if name != "__metadata__":
                ends.append(int(entry["data_offsets"][1]))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        pass
    outcome(seal(data), 8 + len(data) + max(ends))


def run_safetensors(data: bytes) -> None:
    from nstf.errors import NstfError
    from nstf.runtime.artifact.header import parse_header_bytes

    try:
        parse_header_bytes(data[4:], int.from_bytes(data[:4], "little"), "fuzz")
    except NstfError:
        pass


def safetensors_seeds() -> list[bytes]:
    text = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[0],"data_offsets":[8,8]}}'
    return [(16 + len(text)).to_bytes(4, "little") + text]


def gguf_seeds() -> list[bytes]:
    """Two keys of each kind, two tensors."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    keys = [
        text(b"general.alignment") + struct.pack("<II", 4, 32),
        text(b"name") + struct.pack("<I", 8) + text(b"model"),
        text(b"list") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
        text(b"words") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"b"),
        text(b"yes") + struct.pack("<IB", 7, 1),
    ]
    tensors = [
        text(b"a") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0),
        text(b"b") + struct.pack("<IQIQ", 1, 32, 8, 32),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys + tensors)
    return [head + bytes(-len(head) % 32 + 32 + 34)]


def run_gguf(data: bytes) -> None:
    from nstf.errors import NstfError
    from nstf_convert.checkpoint import gguf_check

    if len(data) >= 24:
        try:
            gguf_check._parse(gguf_check._Cursor(data, Path("fuzz")), len(data))  # type: ignore[arg-type]
        except NstfError:
            pass


def onnx_seeds() -> list[bytes]:
    """A graph with two initialisers, one of them outside."""

    def part(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    inside = b"\x08\x02\x10\x01" + part(8, b"weight") + part(9, bytes(8))
    outside = (
        part(1, b"\x02\x03")
        + b"\x10\x01"
        + part(8, b"other")
        + part(13, part(1, b"location") + part(2, b"x.bin"))
    )
    return [part(7, part(5, inside) + part(5, outside + b"\x70\x01"))]


def run_onnx(data: bytes) -> None:
    from nstf_convert.checkpoint.onnx_wire import WireError, initialisers

    try:
        list(initialisers(data))  # type: ignore[arg-type]
    except WireError:
        pass


def config_seeds() -> list[bytes]:
    from small_llama import LLAMA

    return [
        json.dumps(LLAMA).encode(),
        b'{"eos_token_id":[1,2],"temperature":0.7,"id2label":{"0":"a"},"layer_types":["x"]}',
    ]


def run_config(data: bytes) -> None:
    from nstf.errors import NstfError
    from nstf.runtime.artifact.config import Limits, check_config, parse_object

    try:
        check_config(parse_object(data, "fuzz", "config.json"), Limits(20, 64, 100_000), "fuzz")
    except NstfError as error:
        assert str(error).isprintable() and len(str(error)) < 1000, str(error)


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "manifest": (run_manifest, manifest_seeds),
    "safetensors": (run_safetensors, safetensors_seeds),
    "gguf": (run_gguf, gguf_seeds),
    "onnx": (run_onnx, onnx_seeds),
    "config": (run_config, config_seeds),
}


def words_of(seeds: list[bytes]) -> str:
    """libFuzzer's dictionary: the words that the seeds are made of."""
    import re

    words = sorted({w for seed in seeds for w in re.findall(rb"[A-Za-z_][A-Za-z_0-9.]{1,30}", seed)})
    return "".join(f'"{word.decode()}"\n' for word in words)


def instrument(module: ModuleType) -> None:
    """Every function and method that a module defines reports its coverage.

    One by one: atheris's own hook does not see modules of an editable installation.
    """
    import atheris

    for owner in [module, *(c for c in vars(module).values() if inspect.isclass(c))]:
        for found in list(vars(owner).values()):
            if inspect.isfunction(found) and found.__module__ == module.__name__:
                atheris.instrument_func(found)


def main() -> None:
    import atheris

    name, options = sys.argv[1], sys.argv[2:]
    run, seeds = TARGETS[name]
    for first in MODULES[name]:
        importlib.import_module(first)
    for loaded, module in list(sys.modules.items()):
        if any(loaded == prefix or loaded.startswith(f"{prefix}.") for prefix in MODULES[name]):
            instrument(module)
    with tempfile.TemporaryDirectory() as folder:
        made = seeds()
        for number, seed in enumerate(made):
            (Path(folder) / str(number)).write_bytes(seed)
        words = Path(folder).with_suffix(".words")
        words.write_text(words_of(made))
        atheris.Setup(
            [sys.argv[0], f"-dict={words}", "-timeout=2", "-rss_limit_mb=2048", *options, folder], run
        )
        atheris.Fuzz()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()

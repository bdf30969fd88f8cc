"""A small good artifact, and a forge that writes changed ones; and commands that are recorded, to be disturbed.

The forge works on the JSON alone, not through the writer: what it makes is what a stranger could send.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nstf.kernels.formats import EncodedTensor, array_specs, node_from_json
from nstf.runtime.artifact import Shared, write_artifact

sys.path.insert(0, str(Path(__file__).parent))
if TYPE_CHECKING:
    from faults import Runner
    from recorded import Recorded

DENSE = {"kind": "dense", "dtype": "float16"}
INT4 = {"kind": "int", "bits": 4, "group": 8, "symmetric": False, "scale_bits": 8}
TREES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "dense": ({"kind": "dense", "dtype": "bfloat16"}, (3,)),
    "int": (INT4, (4, 16)),
    "grid": ({"kind": "grid", "group": 16}, (2, 20)),
    "fp8": ({"kind": "fp8", "variant": "e4m3fn", "group": 16}, (2, 20)),
    "mxfp4": ({"kind": "mxfp4"}, (2, 40)),
    "low": ({"kind": "low_rank", "rank": 2, "children": {"a": DENSE, "b": INT4}}, (4, 16)),
    "add": ({"kind": "add", "children": {"x": INT4, "y": DENSE}}, (2, 8)),
    "permute": ({"kind": "permute", "dims": [1, 0], "children": {"x": INT4}}, (8, 3)),
    "cp": (
        {"kind": "cp", "rank": 2, "view": [2, 3, 4], "children": {f"factor{i}": DENSE for i in range(3)}},
        (6, 4),
    ),
    "tucker": (
        {"kind": "tucker", "ranks": [2, 4], "view": [3, 4], "children": {"core": DENSE, "factor0": DENSE}},
        (3, 4),
    ),
    "train": (
        {
            "kind": "tensor_train",
            "ranks": [2, 2],
            "view": [2, 3, 4],
            "children": {f"core{i}": DENSE for i in range(3)},
        },
        (6, 4),
    ),
}


@dataclass
class Forged:
    """A taken-apart artifact: the header's JSON, the manifest's JSON, the data."""

    header: dict[str, Any]
    manifest: dict[str, Any]
    data: bytes

    def copy(self) -> "Forged":
        return Forged(json.loads(json.dumps(self.header)), json.loads(json.dumps(self.manifest)), self.data)

    def text(self, seal: bool = True) -> bytes:
        """The header's JSON text; `seal`: with a right digest of itself."""
        if seal:
            self.manifest["header_sha256"] = "0" * 64
            zeroed = self.text(seal=False)
            digest = hashlib.sha256(len(zeroed).to_bytes(8, "little") + zeroed).hexdigest()
            self.manifest["header_sha256"] = digest
        metadata = {"nstf": json.dumps(self.manifest, sort_keys=True, separators=(",", ":"))}
        text = json.dumps({"__metadata__": metadata, **self.header}, sort_keys=True, separators=(",", ":"))
        return text.encode() + b" " * (-(8 + len(text)) % 64)

    def raw(self, seal: bool = True) -> bytes:
        return with_length(self.text(seal)) + self.data


def with_length(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.fixture(scope="session")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small artifact with a tensor of each kind, a shared name and two files."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, EncodedTensor | Shared] = {"tied": Shared("int")}
    for name, (tree, shape) in TREES.items():
        node = node_from_json(tree)
        arrays = {
            path: torch.randn(spec.shape, generator=generator).to(spec.dtype)
            if spec.dtype.is_floating_point
            else torch.randint(0, 256, spec.shape, generator=generator).to(spec.dtype)
            for path, spec in array_specs(node, shape).items()
        }
        tensors[name] = EncodedTensor(node, shape, arrays)
    path = tmp_path_factory.mktemp("attacks") / "good.nstf"
    files = {"config.json": b'{"model_type":"tiny"}' * 20, "tokenizer.model": bytes(range(40))}
    write_artifact(
        path, tensors, files, {"plan": {"a": [1, 2.5, None, {"b": "é"}]}, "report": {"kld": 0.125}}
    )
    return path.read_bytes()


@pytest.fixture
def good(good_file: bytes) -> Forged:
    """The good artifact taken apart, to be changed by the test."""
    length = int.from_bytes(good_file[:8], "little")
    header = json.loads(good_file[8 : 8 + length])
    manifest = json.loads(header.pop("__metadata__")["nstf"])
    return Forged(header, manifest, good_file[8 + length :])


@pytest.fixture
def put(tmp_path: Path) -> Callable[[bytes], Path]:
    """put(raw): the path of a file with these bytes."""

    def write(raw: bytes) -> Path:
        path = tmp_path / "m.nstf"
        path.write_bytes(raw)
        return path

    return write


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    """made(config, **files): an artifact of the tensors of small_llama with this config.json and these files besides."""
    from small_llama import tensors

    stored = tensors()

    def write(config: dict[str, Any] | bytes, **files: bytes) -> Path:
        raw = config if isinstance(config, bytes) else json.dumps(config).encode()
        path = tmp_path / "m.nstf"
        write_artifact(path, stored, {"config.json": raw, **{f"{k}.json": v for k, v in files.items()}})
        return path

    return write


@pytest.fixture(scope="session")
def memory_root() -> Iterator[Path]:
    """In memory where there is such a folder: the disk is a model of ours, and a real one would only be waited for."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def runner(memory_root: Path) -> Iterator["Runner"]:
    import faults
    from recorded import make_inputs

    shim = faults.build(memory_root)
    if shim is None:
        pytest.skip("needs gcc and Linux")
    make_inputs(memory_root / "inputs")
    with faults.runner(shim) as made:
        yield made


@pytest.fixture(scope="session")
def recorded(runner: "Runner", memory_root: Path) -> Callable[[str], "Recorded"]:
    """recorded(name): a command of COMMANDS, run once undisturbed."""
    from recorded import COMMANDS, prepare, record

    made: dict[str, Recorded] = {}

    def of(name: str) -> "Recorded":
        if name not in made:
            command, warm = COMMANDS[name], memory_root / f"{name} warm"
            inputs = memory_root / "inputs"
            if "{folder}/in.nstf" in command.words and not (inputs / "in.nstf").exists():
                whole = of("convert")
                (inputs / "in.nstf").write_bytes(whole.wanted()["out.nstf"])
            prepare(warm, inputs, command)
            answer = runner.ask(folder=str(warm), words=command.words, warm=True)
            assert answer["code"] == 0, answer
            made[name] = record(runner, memory_root / name, inputs, command)
        return made[name]

    return of


@pytest.fixture
def in_memory(memory_root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memory_root) as folder:
        yield Path(folder)

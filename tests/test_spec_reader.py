"""docs/format.md suffices to read a file: examples/spec_reader.py, written from it, decodes what nstf decodes."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import nstf
from nstf.kernels.formats import kinds
from nstf.kernels.formats.shuffle_tables import STEPS, TABLES
from nstf_convert.cli import run
from tests.nstf_convert.pipeline.conftest import make_llama

ROOT = Path(__file__).parent.parent
FILE = ROOT / "examples" / "spec_reader.py"
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def spec() -> ModuleType:
    found = importlib.util.spec_from_file_location("spec_reader", FILE)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    folder = tmp_path_factory.mktemp("spec") / "model"
    make_llama(folder)
    return folder


def compared(spec: ModuleType, path: Path) -> dict[str, float]:
    """The largest difference of each kind of leaf, relative to the tensor's largest value; unread kinds are left out."""
    reader, worst = spec.Reader(path), {}
    with nstf.open(path) as file:
        assert sorted(reader.tensors) == list(file.tensors)
        for name, tensor in file.tensors.items():
            expected = file.decode(name).numpy()
            try:
                found = reader.decode(name)
            except ValueError as error:
                assert "is not in this reader" in str(error)
                continue
            assert found.shape == expected.shape and found.dtype in (expected.dtype, np.float64, np.bool_), (
                name
            )
            difference = np.abs(found.astype(np.float64) - expected).max() / max(
                np.abs(expected).max(), 1e-30
            )
            leaf = tensor.tree
            while "x" in leaf.get("children", {}):
                leaf = leaf["children"]["x"]
            worst[leaf["kind"]] = max(worst.get(leaf["kind"], 0.0), difference)
        assert {name: reader.file(name) for name in reader.files} == {n: file.read(n) for n in file.files}
    return worst


def test_the_reader_is_short_and_uses_nothing_of_ours(spec: ModuleType) -> None:
    text = FILE.read_text("utf-8")
    assert len(text.splitlines()) <= 150
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert names == {"base64", "hashlib", "json", "math", "sys", "zlib", "statistics", "numpy"}


@pytest.mark.parametrize("name", ["v1.nstf", "v1_trellis.nstf"])
def test_the_files_of_the_first_version_are_read_alike(spec: ModuleType, name: str) -> None:
    worst = compared(spec, GOLDEN / name)
    assert {"int", "grid", "dense", "low_rank"} <= set(worst) or {"trellis"} <= set(worst)
    # Integers, tables and trellis states are exact; a rotation is a sum in another order.
    assert max(worst.values()) < 1e-6, worst


@pytest.mark.parametrize(
    ("formats", "leaf"),
    [("int", "int"), ("grid", "grid"), ("trellis", "trellis"), ("add,low_rank,int", "int")],
)
def test_a_conversion_is_read_alike(
    spec: ModuleType, model: Path, formats: str, leaf: str, tmp_path: Path
) -> None:
    words = ["convert", str(model), "--budget", "0.45", "--formats", formats,
             "--dataset", str(ROOT / "examples" / "data" / "prose.txt"), "--effort", "fast", "--prefer", "size",
             "--samples", "2", "--seq-len", "32", "-o", str(tmp_path / "m.nstf"), "--quiet"]  # fmt: skip
    assert run(words) == 0
    worst = compared(spec, tmp_path / "m.nstf")
    assert leaf in worst and max(worst.values()) < 1e-6, worst


def test_tensors_of_a_model_are_read_alike(spec: ModuleType, tmp_path: Path) -> None:
    from safetensors import safe_open

    from nstf.quantizers import grid16, int_grid
    from nstf.runtime.artifact import write_artifact

    tensors = {}
    with safe_open(ROOT / "examples" / "tiny_llama" / "model" / "model.safetensors", "pt") as file:
        weight = file.get_tensor("model.layers.0.self_attn.k_proj.weight").float()
        for bits, group in ((2, 32), (3, 0), (5, 64), (8, 40)):
            params = int_grid.Params(bits=bits, group=group, symmetric=bits != 3)
            tensors[f"int{bits}"] = int_grid.encode(weight[:, :250], params)
        tensors["grid"] = grid16.encode(weight, grid16.Params(group=32))
    write_artifact(tmp_path / "m.nstf", tensors, {}, {})
    assert compared(spec, tmp_path / "m.nstf") == {"int": 0.0, "grid": 0.0}


def test_a_damaged_file_is_refused(spec: ModuleType, tmp_path: Path) -> None:
    data = bytearray((GOLDEN / "v1.nstf").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a.nstf").write_bytes(data)
    with pytest.raises(ValueError, match="differs from its SHA-256"):
        [spec.Reader(tmp_path / "a.nstf").array(name) for name in spec.Reader(tmp_path / "a.nstf").arrays]
    data = (GOLDEN / "v1.nstf").read_bytes().replace(b"bfloat16", b"float016", 1)
    (tmp_path / "b.nstf").write_bytes(data)
    with pytest.raises(ValueError, match="damaged header"):
        spec.Reader(tmp_path / "b.nstf")


def test_the_specification_describes_every_encoding_and_parameter() -> None:
    text = (ROOT / "docs" / "format.md").read_text("utf-8")
    for kind in kinds():
        assert re.search(rf"\*\*{kind}\*\*|\| `{kind}` \|", text), kind


def test_shuffle_codes_decode_as_the_specification_says() -> None:
    # Not in the reader, whose tables would double it: the rule of docs/format.md, one weight at a time.
    import torch

    from nstf.kernels.formats import decode
    from nstf.quantizers import shuffle

    torch.manual_seed(0)
    rows, cols = 300, 70
    for q in (8, 13, 16):
        encoded = shuffle.encode(torch.randn(rows, cols), shuffle.Params(quarter_bits=q))
        codes = encoded.arrays["codes"].numpy()
        scale = encoded.arrays["scale_super"].numpy() * np.square(
            encoded.arrays["scale_codes"].numpy() / np.float32(255)
        )
        tables, phases = bytes.fromhex(TABLES[q]), 16 // np.gcd(q, 16)
        expected = decode(encoded).numpy()

        def symbol(g: int, k: int, column: int, codes: np.ndarray = codes, q: int = q) -> int:
            if k < 0:
                return 0 if g % 8 == 0 else symbol(g - 1, 2 * q + k, column, codes, q)
            byte = int(codes[g, column // 64, k, column % 64 // 2])
            return byte >> 4 if column % 2 else byte & 15

        for row, column in np.random.default_rng(q).integers(0, [rows, cols], (200, 2)):
            g, r = divmod(int(row), 32)
            s, before = -(-(r + 1) * q // 16) - 1, -(-r * q // 16) - 1
            a, b, c = (symbol(g, s - i, int(column)) for i in range(3))
            first, second = (a ^ b, a ^ c) if r and s == before else (a ^ c, b)
            at = 32 * (r % phases)
            level = tables[at + first] + tables[at + 16 + second]
            value = scale[row] * np.float32(STEPS[q]) * (level - 31.5)
            assert value == pytest.approx(expected[row, column], rel=1e-6, abs=1e-7)

"""The worked examples of CONTRIBUTING.md run as they are printed."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

import nstf.decomposers
import nstf.kernels.formats
import nstf.quantizers
from nstf.decomposers.factors import dense_bytes, dense_leaf, lead_for
from nstf.kernels.formats import EncodedTensor, check, decode, stored_bytes, tree
from nstf.proposals import Recipe, Room, Signature, Target
from nstf.quantizers import int_grid
from nstf.quantizers.stats import Stats, loss
from nstf_convert.cli import run
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline import Budget, plan
from nstf_convert.pipeline.propose import methods

from .nstf_convert.pipeline.conftest import WORDS, make_llama

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text("utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", TEXT, re.DOTALL))


PACKAGES = {
    "kernels/formats": nstf.kernels.formats,
    "quantizers": nstf.quantizers,
    "decomposers": nstf.decomposers,
}


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The examples as files of their packages, found as every file there is, and the packages as they were afterwards."""
    for path, code in EXAMPLES.items():
        file = tmp_path / "examples" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    for folder, package in PACKAGES.items():
        package.__path__.append(str(tmp_path / "examples" / folder))
    tree._formats.cache_clear()
    tree._format.cache_clear()
    for package in (nstf.quantizers, nstf.decomposers):
        monkeypatch.setattr(package, "METHODS", package.listed())
    names = {path: "nstf." + path.removesuffix(".py").replace("/", ".") for path in EXAMPLES}
    yield {path: importlib.import_module(name) for path, name in names.items()}
    for package in PACKAGES.values():
        package.__path__.pop()
    for name in names.values():
        parent, _, child = name.rpartition(".")
        delattr(sys.modules[parent], child)
        del sys.modules[name]
    tree._formats.cache_clear()
    tree._format.cache_clear()
    methods._source.cache_clear()


def weight_and_stats() -> tuple[torch.Tensor, Stats]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 96, generator=generator)
    x = torch.randn(400, 96, generator=generator) @ torch.randn(96, 96, generator=generator)
    return weight, Stats(x.T @ x / 400)


def test_the_page_shows_one_quantiser_one_format_and_one_decomposer() -> None:
    assert list(EXAMPLES) == ["quantizers/nf4.py", "kernels/formats/kronecker.py", "decomposers/kronecker.py"]


def test_the_quantiser_of_the_page_works_and_uses_the_calibration(example: dict[str, ModuleType]) -> None:
    nf4 = example["quantizers/nf4.py"]
    weight, stats = weight_and_stats()
    losses = {}
    for rounding in ("nearest", "ldlq"):
        params = nf4.Params(group=32, rounding=rounding)
        encoded = nf4.encode(weight, params, stats)
        check(encoded)
        assert encoded.size_bytes * 8 / weight.numel() == nf4.bits(tuple(weight.shape), params)
        losses[rounding] = loss(weight, decode(encoded), stats)
        assert 0.3 < nf4.estimate(weight, params, stats) / losses[rounding] < 3
    assert losses["ldlq"] < losses["nearest"]
    plain = nf4.encode(weight, nf4.Params(group=32))
    assert float((decode(plain) - weight).norm() / weight.norm()) < 0.12


def test_the_decomposer_of_the_page_is_exact_at_full_rank_and_can_be_quantised(
    example: dict[str, ModuleType],
) -> None:
    kronecker = example["decomposers/kronecker.py"]
    weight, _ = weight_and_stats()
    full = kronecker.decompose(weight, kronecker.Params(48, 6, 8))
    assert torch.allclose(full.dense(), weight, atol=1e-4)
    errors = []
    for rank in (1, 8, 24):
        found = kronecker.decompose(weight, kronecker.Params(rank, 6, 8))
        errors.append(float((found.dense() - weight).norm() / weight.norm()))
    assert errors == sorted(errors, reverse=True)
    assert kronecker.rank_for_error(weight, errors[1] + 1e-6, 6, 8) == 8

    size = weight.numel()
    rank = kronecker.rank_for_bytes(tuple(weight.shape), size, dense_bytes("bfloat16"), 6, 8)
    stored = kronecker.decompose(weight, kronecker.Params(rank, 6, 8)).encode(dense_leaf("bfloat16"))
    check(stored)
    assert size * 0.95 < stored_bytes(stored.tree, stored.shape) <= size

    def leaf(name: str, factor: torch.Tensor, metric: torch.Tensor | None) -> EncodedTensor:
        params = int_grid.Params(bits=8, group=0, lead=lead_for(tuple(factor.shape)))
        return int_grid.encode(factor, params, Stats(metric))

    rounded = decode(full.encode(leaf))
    assert float((rounded - weight).norm() / weight.norm()) < 0.02


def test_a_whole_conversion_uses_both_methods_of_the_page(
    example: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, planted = tmp_path / "model", "model.layers.0.mlp.up_proj.weight"
    from transformers import LlamaForCausalLM

    make_llama(model, layers=1)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(model / "model.safetensors")
    a, b = (torch.randn(2, *size, generator=generator) for size in ((8, 8), (12, 8)))
    weight = torch.einsum("rij,rkl->ikjl", a, b).reshape(96, 64)
    weight = weight / weight.std() + 0.02 * torch.randn(96, 64, generator=generator)
    save_file({**tensors, planted: 0.25 * weight.bfloat16()}, model / "model.safetensors", {"format": "pt"})
    text, out, report = tmp_path / "text.txt", tmp_path / "out.nstf", tmp_path / "report.json"
    text.write_text(" ".join(WORDS[i % len(WORDS)] for i in range(0, 7 * 900, 7)))
    command = re.search(r"^    nstf (convert MODEL .*)$", TEXT, re.MULTILINE)
    assert command is not None
    given = {"MODEL": str(model), "TEXT": str(text), "OUT": str(out), "REPORT": str(report)}
    words = [given.get(word, word) for word in command[1].split()]
    # What the page leaves out makes it quick.
    quick = "--samples 6 --seq-len 32 --threads 1 --effort fast --prefer size".split()
    code = run(["plan", *words[1 : words.index("--output")], *quick, "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    expected = {t["name"]: t["method"] for t in json.loads(printed.out)["tensors"]}
    assert expected[planted] == "kronecker" and set(expected.values()) == {"dense", "kronecker", "nf4"}
    code = run([*words, *quick])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    written = json.loads(report.read_text())
    by_name = {t["name"]: t for t in written["tensors"]}
    assert by_name[planted]["method"] == "kronecker" and by_name[planted]["tree"]["kind"] == "kronecker"
    assert {t["method"] for t in written["tensors"]} == {"dense", "kronecker", "nf4"}
    assert any(f["family"] == "kronecker" and f["chosen"] >= 1 for f in written["families"])
    assert re.search(r"kronecker: tried on \d+ tensors, won on", printed.out)
    file = nstf.open(out)
    assert file.tensors[planted].tree["kind"] == "kronecker"
    loaded = nstf.runtime.load(out)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        logits = loaded(tokens).logits
    original = load_file(model / "model.safetensors")[planted].float()
    assert float((file.decode(planted).float() - original).norm() / original.norm()) < 0.05
    decoded = {name: file.decode(name) for name in file.tensors}
    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference.load_state_dict({n: decoded.get(n, v) for n, v in reference.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(logits.float(), reference(tokens).logits, rtol=0.02, atol=0.02)


def test_a_contributed_method_is_asked_again_at_the_bits_of_a_first_plan(
    example: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though `add`, whose corrections are the built-in use of it, is not among the methods."""
    kronecker = example["decomposers/kronecker.py"]
    planned = []

    def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
        if room.planned is None:
            return []
        planned.append(room.planned)
        params, factor = {"rank": 2, "rows": 8, "cols": 8}, Recipe("int_grid", {"bits": 8, "group": 0})
        return [Recipe("kronecker", params, {"factor": factor})]

    monkeypatch.setattr(kronecker, "proposals", proposals)
    checkpoint = tmp_path / "planted.safetensors"
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, *size, generator=generator) for size in ((8, 8), (12, 8)))
    name = "layers.0.mlp.up_proj.weight"
    save_file({name: torch.einsum("rij,rkl->ikjl", a, b).reshape(96, 64)}, checkpoint)
    report = plan(
        ConvertOptions(
            model=str(checkpoint), budget=Budget("ratio", 0.13), output=tmp_path / "out.nstf", threads=1,
            formats=("int_grid", "kronecker"), prefer="size",
        )
    )  # fmt: skip
    assert planned and 0.0 < min(planned) <= max(planned) <= 4.0
    assert [t["method"] for t in report["tensors"]] == ["kronecker"]


def test_a_contributed_quantiser_is_asked_again_at_the_bits_of_a_first_plan(
    example: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nf4 = example["quantizers/nf4.py"]
    planned = []

    def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
        if room.planned is None:
            room.skip("nf4", "only at a known rate")
            return []
        planned.append(room.planned)
        return [Recipe("nf4", {"group": 64})]

    monkeypatch.setattr(nf4, "proposals", proposals)
    checkpoint = tmp_path / "plain.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.mlp.up_proj.weight": torch.randn(96, 128, generator=generator) for i in range(2)}
    save_file({n: 10.0**i * w for i, (n, w) in enumerate(tensors.items())}, checkpoint)
    report = plan(
        ConvertOptions(
            model=str(checkpoint), budget=Budget("ratio", 0.128), output=tmp_path / "out.nstf", threads=1,
            formats=("int_grid", "nf4"), prefer="size",
        )
    )  # fmt: skip
    assert planned and max(planned) <= 4.0
    for tensor in report["tensors"]:
        tried = {tensor["encoding"].split()[0], *(r["encoding"].split()[0] for r in tensor["rejected"])}
        reasons = {n["method"]: n["reason"] for n in tensor["not_tried"]}
        # Where a first plan gave it more than four bits the report has the method's own words.
        assert ("grid16" in tried) != (reasons.get("nf4") == "only at a known rate")
    assert any("grid16" in r["encoding"] for t in report["tensors"] for r in [t, *t["rejected"]])


def test_the_methods_of_the_page_can_be_asked_for_by_name_alone(example: dict[str, ModuleType]) -> None:
    assert methods.method_families(["nf4", "kronecker"]) == {"nf4", "kronecker", "dense"}
    assert {"nf4", "kronecker"} < methods.method_families(None)
    assert "| `kronecker` | `decomposers/kronecker.py` |" in methods.table()


def test_a_method_without_an_example_is_unknown_again() -> None:
    assert "kronecker" not in nstf.kernels.formats.kinds()
    with pytest.raises(ValueError, match="unknown format 'nf4'"):
        methods.method_families(["nf4"])


def test_the_documentation_lists_every_method() -> None:
    page = (Path(__file__).parent.parent / "docs" / "structure.md").read_text("utf-8")
    assert methods.table() in page, (
        "put what `python -m nstf_convert.pipeline.propose.methods` prints into docs/structure.md"
    )

"""Panels: which matrices of a file the engine repacks, what stays of the file in memory, and what it does without room."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nstf.runtime
from nstf.errors import NstfError
from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import available, compile_matrix, panel_threads
from nstf.kernels.formats import EncodedTensor, Node
from nstf.kernels.formats.tree import format_of
from nstf.runtime import copying, engine_text
from nstf.runtime import engine as engines
from nstf.runtime.artifact import open_artifact, write_artifact
from nstf.runtime.copying import Copying
from nstf.runtime.engine import Engine

pytestmark = pytest.mark.skipif(
    not available() or not ext.isa().startswith("avx"), reason="the engine has no panels here"
)

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
# 11 MB, of which all but the norms are repacked.
LARGE = {**SMALL, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 8192, "num_hidden_layers": 2}
Q = "model.layers.0.self_attn.q_proj.weight"


def node(kind: str, children: dict[str, Node] | None = None, **params: Any) -> Node:
    return Node(kind, format_of(kind).Params(**params), children or {})


INT8 = node("int", bits=8, group=32, scale_bits=8)
INT6 = node("int", bits=6, group=32, scale_bits=8, symmetric=False)
NESTED = {
    "rotated": node("rotated", {"x": INT6}, block_in=32, seed=3),
    "rotated rows": node("rotated", {"x": INT6}, block_in=32, block_out=32, seed=3),
    "low rank": node("low_rank", {"a": INT8, "b": INT8}, rank=32),
    "add": node("add", {"x": INT6, "y": node("low_rank", {"a": INT8, "b": INT8}, rank=32)}),
    "add of a trellis": node(
        "add", {"x": node("grid", group=32, scale_bits=8), "y": node("trellis", quarter_bits=(8,))}
    ),
    "as it is": node("permute", {"x": INT6}, dims=(0, 1)),
}


def write(tiny: ModuleType, path: Path, config: dict[str, Any], tree: Node) -> Path:
    """A file of a Llama model whose matrices all are stored as this tree, at random."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    tensors: dict[str, EncodedTensor] = {}
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        shape = tuple(parameter.shape)
        tensors[name] = (
            tiny.random_encoded(tree, shape, seed) if len(shape) == 2 else tiny.dense(parameter.data)
        )
    files = {"config.json": json.dumps(tiny.config_json(model)).encode()}
    write_artifact(path / "model.nstf", tensors, files, {})
    return path / "model.nstf"


def ids_of(count: int) -> torch.Tensor:
    return torch.randint(3, 100, (count,), generator=torch.Generator().manual_seed(0))


def repacked(engine: Engine) -> set[bool]:
    return {"panels int8" in kernel for kernel in engine.kernels.values()}


def mapped_bytes(path: Path) -> list[int]:
    """Resident bytes of every mapping of a file in this process."""
    found, ours = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            found.append(int(line.split()[1]) * 1024)
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")


@pytest.mark.parametrize("name", sorted(NESTED))
def test_what_is_priced_is_what_the_engine_runs(tiny: ModuleType, tmp_path: Path, name: str) -> None:
    path = write(tiny, tmp_path, SMALL, NESTED[name])
    with open_artifact(path) as artifact:
        # As nstf_convert/speed prices matrices of a model of this size.
        priced = compile_matrix(artifact.encoded(Q), panels=panel_threads(artifact.size_bytes, 1)).kernel
        engine, stored = Engine(artifact, threads=1), Engine(artifact, threads=1, panels=False)
    assert engine.kernels[Q] == priced and repacked(engine) == {True} and repacked(stored) == {False}
    ids = ids_of(30)
    expected, found = (e.forward(ids, all_logits=True) for e in (stored, engine))
    assert float((found - expected).square().mean().sqrt()) < 0.01 * float(expected.std())
    stored.reset()
    engine.reset()
    for i in ids[:5]:
        one, other = stored.forward([int(i)]), engine.forward([int(i)])
        assert float((one - other).square().mean().sqrt()) < 0.01 * float(one.std())


@needs_proc
@pytest.mark.parametrize("verify", [True, False])
def test_panels_take_the_place_of_the_files_pages(tiny: ModuleType, tmp_path: Path, verify: bool) -> None:
    path = write(tiny, tmp_path, LARGE, INT8)
    engine = Engine.open(path, verify=verify)
    assert repacked(engine) == {True}
    # Codes are what takes memory; the rest is the header, the norms, and what the system maps beside them.
    assert sum(mapped_bytes(path)) < path.stat().st_size / 4


@needs_proc
def test_an_engine_for_one_text_keeps_no_more(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tiny, tmp_path, LARGE, INT8)

    class Tokenizer:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return "a " * len(tokens)

    monkeypatch.setattr(engine_text, "_generation", lambda artifact: (frozenset(), {}))
    monkeypatch.setattr(engine_text, "_encoded", lambda artifact, prompt, context: (Tokenizer(), [3, 4, 5]))
    pieces = engine_text.stream(path, "a time", 5)
    assert next(pieces) == "a "
    assert sum(mapped_bytes(path)) < path.stat().st_size / 4


@needs_proc
@pytest.mark.parametrize(
    "tree", [INT8, NESTED["add of a trellis"], node("int", bits=8, group=32, scale_bits=16)]
)
def test_the_second_mapping_is_given_back(tiny: ModuleType, tmp_path: Path, tree: Node) -> None:
    path = write(tiny, tmp_path, SMALL, tree)
    with open_artifact(path) as artifact:
        engine = Engine(artifact)
        assert len(mapped_bytes(path)) == 1
        assert engine.forward([3]).isfinite().all()


def test_only_files_up_to_a_size_are_repacked(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_artifact(write(tiny, tmp_path, SMALL, INT8)) as artifact:
        monkeypatch.setattr(engines, "PANEL_BYTES", artifact.size_bytes)
        assert repacked(Engine(artifact)) == {True}
        monkeypatch.setattr(engines, "PANEL_BYTES", artifact.size_bytes - 1)
        assert repacked(Engine(artifact)) == {False}
        assert repacked(Engine(artifact, panels=True)) == {True}
        assert repacked(Engine(artifact, panels=True, exact=True)) == {False}


def test_of_a_file_that_was_replaced_the_open_one_runs_as_it_is_stored(
    tiny: ModuleType, tmp_path: Path
) -> None:
    path = write(tiny, tmp_path, SMALL, INT8)
    with open_artifact(path) as artifact:
        expected = Engine(artifact).forward([3, 4])
        other = tmp_path / "other"
        other.mkdir()
        write(tiny, other, SMALL, INT6).replace(path)
        stored, own = Engine(artifact), Engine(artifact, panels=True)
    assert repacked(stored) == {False} and repacked(own) == {True}
    assert torch.equal(own.forward([3, 4]), expected)
    torch.testing.assert_close(stored.forward([3, 4]), expected, rtol=0, atol=0.05 * float(expected.std()))


def test_a_file_read_into_memory_is_repacked_only_when_asked(tiny: ModuleType, tmp_path: Path) -> None:
    path = write(tiny, tmp_path, SMALL, INT8)
    with open_artifact(path, mapped=False) as artifact:
        assert repacked(Engine(artifact)) == {False}
        assert repacked(Engine(artifact, panels=True)) == {True}
    with open_artifact(path) as artifact:
        assert repacked(Engine(artifact)) == {True}


def test_where_memory_ends_the_rest_stays_as_it_is_stored(tiny: ModuleType, tmp_path: Path) -> None:
    path = write(tiny, tmp_path, LARGE, INT8)
    code = f"""
import resource
from pathlib import Path
from nstf.errors import NstfError
from nstf.runtime.artifact import open_artifact
from nstf.runtime.engine import Engine

artifact = open_artifact({str(path)!r})
Engine(artifact, threads=1, panels=False)
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
# The second mapping, and three quarters of the panels; more where the first engine's memory is not free for the second.
for quarters in range(7, 12):
    limit = now + artifact.size_bytes * quarters // 4
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        engine = Engine(artifact, threads=1)
        break
    except NstfError:
        continue
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
kernels = [kernel.partition(" ")[0] for kernel in engine.kernels.values()]
print(kernels[0], *set(kernels[kernels.index("packed"):]))
print(bool(engine.forward([3, 4, 5]).isfinite().all()))
"""
    if resource.getrlimit(resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY:
        pytest.skip("memory is limited already")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["panels packed", "True"], done.stderr
    assert "not enough memory to repack model.layers." in done.stderr


def test_what_is_written_into_a_loaded_model_is_what_its_engine_runs(
    tiny: ModuleType, tmp_path: Path
) -> None:
    path = write(tiny, tmp_path, SMALL, INT8)
    model: Any = nstf.runtime.load(path)
    ids = ids_of(6)[None]

    def check(panels: bool) -> torch.Tensor:
        model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0, eos_token_id=-1)
        engine = model.nstf_engine.engine
        assert repacked(engine) == {panels}
        engine.reset()
        found = engine.forward(ids[0])
        with torch.no_grad():
            expected = model(ids).logits[0, -1]
        assert float((found - expected).square().mean().sqrt()) < 0.15 * float(expected.std())
        return expected

    before = check(True)
    for name, array in model.named_buffers():
        if name.endswith("codes") and "layers" in name:
            array.copy_(array.flip(0))
    after = check(False)
    assert float((after - before).square().mean().sqrt()) > 0.5 * float(before.std())


@pytest.mark.parametrize("name", sorted(NESTED))
def test_panels_made_in_the_background_are_the_same(tiny: ModuleType, tmp_path: Path, name: str) -> None:
    path = write(tiny, tmp_path, SMALL, NESTED[name])
    with open_artifact(path) as artifact:
        expected = Engine(artifact).forward(ids_of(9))
        later = Engine(artifact, copy_later=True)
    later.finish()
    later.finish()
    assert torch.equal(later.forward(ids_of(9)), expected)


def test_without_a_thread_panels_are_made_where_one_waits(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    path = write(tiny, tmp_path, SMALL, INT8)
    with open_artifact(path) as artifact:
        expected = Engine(artifact).forward([3, 4])
        monkeypatch.setattr(copying._thread, "start_new_thread", refuse)
        later = Engine(artifact, copy_later=True)
    later.finish()
    assert torch.equal(later.forward([3, 4]), expected)


def test_what_copying_in_the_background_raises_is_raised_where_one_waits(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Copies:
        def run(self, threads: int) -> None:
            raise MemoryError

    monkeypatch.setattr(
        engines, "Copying", lambda copies, threads, background: Copying(Copies(), threads, background)
    )
    with open_artifact(write(tiny, tmp_path, SMALL, INT8)) as artifact:
        later = Engine(artifact, copy_later=True)
        with pytest.raises(NstfError, match="not enough memory to repack"):
            later.finish()
        with pytest.raises(NstfError, match="not enough memory"):
            Engine(artifact)

"""Compiled kernels beside an artifact: which matrices they are for, and loading them where they match or not."""

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nstf.errors import CorruptError, UsageError
from nstf.kernels.formats import EncodedTensor, Node
from nstf.kernels.formats.tree import format_of
from nstf.runtime.artifact import Shared, open_artifact, write_artifact
from nstf.runtime.compiled import all_specs, matrices, side_path, use_compiled
from nstf.runtime.decoder_specs import decoder_specs, stacked_matrices


def dense(*shape: int) -> EncodedTensor:
    node = Node("dense", format_of("dense").Params("float32"))
    return EncodedTensor(node, shape, {"values": torch.ones(shape)})


def artifact(path: Path, config: object, shared: bool = False) -> Path:
    tensors = {"embed": dense(6, 4), "layer": dense(4, 4), "experts": dense(3, 5, 4), "norm": dense(4)}
    if shared:
        tensors["head"] = Shared("embed")
    meta = {"plan": {"roles": {"embed": "embedding", "layer": "o"}}}
    write_artifact(path, tensors, {"config.json": json.dumps(config).encode()}, meta)
    return path


def shapes(path: Path) -> list[tuple[int, ...]]:
    with open_artifact(path) as opened:
        return sorted(tuple(encoded.shape) for encoded in matrices(opened))


def test_matrices_and_the_first_expert_are_multiplied_and_tables_looked_up(tmp_path: Path) -> None:
    untied = artifact(tmp_path / "a.nstf", {"tie_word_embeddings": False})
    assert shapes(untied) == [(4, 4), (5, 4)]


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}, []])
def test_a_table_that_may_be_the_output_layer_counts(tmp_path: Path, config: object) -> None:
    assert shapes(artifact(tmp_path / "a.nstf", config)) == [(4, 4), (5, 4), (6, 4)]


def test_a_shared_table_counts_once(tmp_path: Path) -> None:
    path = artifact(tmp_path / "a.nstf", {"tie_word_embeddings": False}, shared=True)
    assert shapes(path) == [(4, 4), (5, 4), (6, 4)]


def test_the_side_file_lies_beside_the_artifact() -> None:
    assert side_path("models/m.nstf", "gfx942") == Path("models/m.gfx942.nstfk")


def test_a_file_for_another_gpu_is_left_alone_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from nstf.kernels.triton import aot, side_file
    from nstf.kernels.triton.architecture import architecture

    monkeypatch.setattr(aot, "target_here", lambda: "gfx942")
    side = tmp_path / "a.gfx950.nstfk"
    side.write_bytes(side_file.pack([], architecture("gfx950"), [1], "float16"))
    with caplog.at_level(logging.INFO, "nstf"), open_artifact(artifact(tmp_path / "a.nstf", {})) as opened:
        use_compiled(opened, side)
        assert "compiled for gfx950, the GPU here is gfx942" in caplog.text
        caplog.clear()
        monkeypatch.setattr(aot, "target_here", lambda: "gfx950")
        use_compiled(opened, side)
        assert "0 compiled kernels, 0 left to compile" in caplog.text
        with pytest.raises(UsageError, match="cannot be read"):
            use_compiled(opened, tmp_path / "none.nstfk")
        side.write_bytes(b"no kernels")
        with pytest.raises(CorruptError, match="not a file of compiled kernels"):
            use_compiled(opened, side)


def test_stacks_and_the_kernels_of_decoding_are_compiled_too(tiny: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from nstf.kernels.triton.architecture import architecture

    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    with open_artifact(path) as opened:
        assert [m.shape for m in stacked_matrices(opened)] == [(64, 32)] * 2 + [(96, 32)] * 2
        specs = all_specs(opened, (1, 100), torch.float16, architecture("gfx942")).values()
    kinds = [spec.kind for spec in specs]
    assert {"gemv", "gemm", "attend", "gate", "embed"} <= set(kinds) and kinds.count("norm") == 2
    other = tiny.write(tmp_path, tiny.new_model("GPT2LMHeadModel"))
    with open_artifact(other) as opened:
        assert list(stacked_matrices(opened)) == []
        assert decoder_specs(opened, (1,), torch.float16, architecture("gfx942")) == []


@pytest.mark.parametrize("kind", ["trellis", "shuffle"])
def test_look_ups_in_rotated_tables_are_compiled_too(kind: str, tiny: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from nstf import quantizers
    from nstf.kernels.triton.architecture import architecture

    module: Any = quantizers.method(kind)
    model = tiny.new_model("LlamaForCausalLM")
    tensors, name = tiny.encode_model(model), "model.embed_tokens.weight"
    tensors[name] = module.encode(model.get_parameter(name).detach().float(), module.Params(block=32))
    path = tmp_path / "rotated.nstf"
    write_artifact(path, tensors, {"config.json": json.dumps(tiny.config_json(model)).encode()})
    with open_artifact(path) as opened:
        found = decoder_specs(opened, (1,), torch.float16, architecture("gfx942"))
    assert {f"{kind}_embed", "rotate"} <= {spec.kind for spec in found}


def test_the_kernels_of_a_plan_are_compiled_too(tiny: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from nstf.kernels.triton.architecture import architecture

    four = {"bits": 4, "by": "channel", "rotate": False}
    plain = {"bits": 16, "by": "token", "rotate": False}
    full, band, sparse = (
        {"pattern": name, "params": params, "min_length": 0, "error": 0.0, "mass": 1.0}
        for name, params in (
            ("full", {}),
            ("streaming", {"sink": 0, "window": 100}),
            ("block_sparse", {"threshold": 0.9, "stride": 16}),
        )
    )
    groups = [
        {"sink": 0, "recent": 100, "min_length": 0, "keys": plain, "values": plain},
        {"sink": 0, "recent": 0, "min_length": 0, "keys": four, "values": four},
    ]
    layer = {"heads": [band, band, sparse, full], "groups": groups}
    plan = {
        "version": 2, "context": 512, "kv_budget": None, "head_dim": 64, "layers": [layer, layer],
        "kld": {"allowed": None, "choose": None, "report": None},
    }  # fmt: skip
    model = tiny.new_model("LlamaForCausalLM", head_dim=64)
    row = architecture("gfx942")
    with open_artifact(tiny.write(tmp_path, model)) as opened:
        before = all_specs(opened, (1,), torch.float16, row)
    with open_artifact(tiny.write(tmp_path, model, attention=plan)) as opened:
        found = all_specs(opened, (1,), torch.float16, row)
        # The kernels run in 16 bits alone.
        assert not any(
            spec.kind.startswith("attention_")
            for spec in all_specs(opened, (1,), torch.float32, row).values()
        )
    kinds = Counter(spec.kind for name, spec in found.items() if name not in before)
    # A ring of 16 bits, and codes with a dense and a sparse head; both layers alike.
    assert kinds == {
        "attention_append": 2, "attention_decode": 2, "attention_merge": 2, "attention_store": 4, "attention_fetch": 4,
        "attention_prefill": 3, "attention_sums": 1,
    }  # fmt: skip


@pytest.mark.gpu
def test_a_side_file_serves_a_whole_model_without_compiling(tiny: ModuleType, tmp_path: Path) -> None:
    """Compiled in one process, loaded in another with an empty cache: no launch of a prompt or of decoding compiles."""
    from nstf.kernels.triton import aot, side_file
    from nstf.kernels.triton.architecture import architecture

    target = aot.target_here()
    assert target is not None
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM", hidden_size=128, intermediate_size=256))
    with open_artifact(path) as opened:
        # Prompts are filled up to 64 tokens.
        specs = all_specs(opened, (1, 2, 64, 128), torch.bfloat16, architecture(target))
    made = [aot.compile_spec(spec, architecture(target)) for spec in specs.values()]
    side = side_path(path, target)
    side.write_bytes(side_file.pack(made, architecture(target), (1, 2, 64, 128), "bfloat16"))
    program = """
import sys, torch, triton, nstf.runtime
compiled = []
triton.knobs.compilation.listener = lambda **e: compiled.append(e["src"].name) if not e["cache_hit"] else None
model = nstf.runtime.load(sys.argv[1], "cuda", dtype=torch.bfloat16, kernels=sys.argv[2])
for batch, tokens in ((1, 32), (2, 16)):
    ids = torch.randint(3, 100, (batch, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
assert model.nstf_graphs.engine is not None
print("compiled:", compiled)
"""
    # Tiles that were measured on this card before are others than the side file's.
    own = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "XDG_CACHE_HOME": str(tmp_path)}
    environment = os.environ | own
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(side)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "compiled: []"

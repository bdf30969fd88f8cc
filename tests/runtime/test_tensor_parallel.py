"""What each rank holds of a model: parts make the tensors, heads stay whole, what does not fit is named."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nstf import quantizers
from nstf.errors import NstfError, UnsupportedError, UsageError
from nstf.kernels.formats import EncodedTensor, FormatError, Node, decode
from nstf.kernels.formats.dense import Params as Dense
from nstf.runtime import divided_modules
from nstf.runtime.artifact import Shared, open_artifact, write_artifact
from nstf.runtime.skeleton import build_skeleton
from nstf.runtime.tensor_parallel import Division, Span, part, tensor_parts, text_config
from nstf_convert.cli import run

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "tie_word_embeddings": True, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Path]:
    """An artifact of random weights: every matrix by one quantiser."""

    def make(config: dict[str, Any], kind: str, **params: Any) -> Path:
        torch.manual_seed(0)
        tensors: dict[str, Any] = {}
        module: Any = quantizers.method(kind)
        for name, value in build_skeleton(config).named_parameters():
            weight = torch.randn(value.shape)
            if weight.dim() == 2:
                tensors[name] = module.encode(weight, module.Params(**params))
            else:
                tensors[name] = EncodedTensor(
                    Node("dense", Dense("float32")), tuple(weight.shape), {"values": weight}
                )
        if config.get("tie_word_embeddings"):
            tensors["lm_head.weight"] = Shared("model.embed_tokens.weight")
        path = tmp_path / f"{kind}.nstf"
        write_artifact(path, tensors, {"config.json": json.dumps(config).encode()})
        return path

    return make


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_parts_of_all_ranks_make_every_tensor(stored: Callable[..., Path], ranks: int) -> None:
    with open_artifact(stored(LLAMA, "int_grid", bits=4, group=16)) as artifact:
        cut = 0
        for name, found in tensor_parts(artifact, ranks).items():
            assert found.problem is None
            whole = decode(artifact.encoded(name))
            if found.spans is None:
                assert whole.dim() == 1  # norms
                continue
            pieces = [decode(part(artifact, name, found, rank)) for rank in range(ranks)]
            if name.endswith(("k_proj.weight", "v_proj.weight")) and ranks > 2:
                # Two KV heads: neighbouring ranks share one.
                assert all(torch.equal(p, whole[16 * (r * 2 // ranks) :][:16]) for r, p in enumerate(pieces))
            else:
                assert torch.equal(torch.cat(pieces, found.spans[0].axis), whole)
            cut += 1
        assert cut == 9  # seven of the layer, the table and the head that is the same


def test_what_cannot_be_divided_is_named(stored: Callable[..., Path]) -> None:
    with open_artifact(stored(LLAMA, "int_grid", bits=4, group=64)) as artifact:
        found = tensor_parts(artifact, 4)
        assert found["model.layers.0.mlp.down_proj.weight"].problem is None  # 256 columns
        problem = found["model.layers.0.self_attn.o_proj.weight"].problem
        assert problem == "parts of 32 positions are no multiple of 64"
        with pytest.raises(UnsupportedError, match=r"o_proj\.weight cannot be divided: parts of 32"):
            part(
                artifact,
                "model.layers.0.self_attn.o_proj.weight",
                found["model.layers.0.self_attn.o_proj.weight"],
                0,
            )
        assert "8 query heads" in str(
            tensor_parts(artifact, 3)["model.layers.0.self_attn.q_proj.weight"].problem
        )
        with pytest.raises(UsageError, match="1 to 1024"):
            tensor_parts(artifact, 0)


@pytest.mark.parametrize(("rows", "ranks", "parts"), [
    (1000, 2, [512, 488]), (100, 4, [32, 32, 32, 4]),
])  # fmt: skip
def test_tables_are_divided_as_engines_pad_them_where_all_get_rows(
    rows: int, ranks: int, parts: list[int]
) -> None:
    from nstf.runtime.tensor_parallel import Division

    division = Division(LLAMA, ranks)
    found = division.spans("model.embed_tokens.weight", Node("dense", Dense("float32")), (rows, 128))
    assert found is not None and [span.size for span in found] == parts


@pytest.mark.parametrize(("rows", "padded"), [(128, 128), (262144, 262144), (100, 128)])
def test_a_table_of_which_parts_would_miss_rows_is_refused(rows: int, padded: int) -> None:
    from nstf.runtime.tensor_parallel import Division

    message = f"{rows} rows, padded to {padded} in steps of 64, cannot be divided by 3 ranks evenly"
    with pytest.raises(FormatError, match=message):
        Division(LLAMA, 3).spans("model.embed_tokens.weight", Node("dense", Dense("float32")), (rows, 128))
    found = Division(LLAMA, 3).spans("lm_head.weight", Node("dense", Dense("float32")), (192, 128))
    assert found is not None and [(s.start, s.stop) for s in found] == [(0, 64), (64, 128), (128, 192)]


def test_experts_are_divided_by_experts() -> None:
    from nstf.runtime.tensor_parallel import axis_of

    plan = {
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
    }
    assert axis_of("model.layers.3.mlp.experts.down_proj", plan) == 0
    assert axis_of("model.layers.3.mlp.experts.gate_up_proj", plan) == 0
    assert axis_of("model.layers.3.mlp.gate.weight", plan) is None


def test_the_bias_of_a_product_by_columns_is_added_once() -> None:
    from nstf.runtime.tensor_parallel import axis_of

    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}
    assert axis_of("model.layers.0.self_attn.q_proj.bias", plan) == 0
    assert axis_of("model.layers.0.self_attn.o_proj.bias", plan) is None


def test_inspect_says_whether_a_file_can_be_divided(
    stored: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored(LLAMA, "int_grid", bits=4, group=64)
    assert run(["inspect", str(path), "--tp", "2"]) == 0
    assert "can be divided among 2 ranks" in capsys.readouterr().out
    assert run(["inspect", str(path), "--tp", "4", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["tensor_parallel"]
    assert summary["ranks"] == 4 and list(summary["problems"]) == ["model.layers.0.self_attn.o_proj.weight"]


def test_a_part_too_small_for_a_decomposition_is_known_beforehand() -> None:
    from nstf.kernels.formats.low_rank import Params as LowRank
    from nstf.runtime.tensor_parallel import Division

    dense = Node("dense", Dense("float32"))
    tree = Node("low_rank", LowRank(40), {"a": dense, "b": dense})
    name, shape = "model.layers.0.mlp.gate_proj.weight", (256, 128)
    assert Division(LLAMA, 4).holds(name, tree, shape)
    assert not Division(LLAMA, 8).holds(name, tree, shape)  # 32 rows of rank 40


def test_norms_over_all_heads_are_cut_with_them() -> None:
    plain = Node("dense", Dense("float32"))
    olmo = Division({**LLAMA, "model_type": "olmo2"}, 2)
    for name, size in (("q_norm", 128), ("k_norm", 32)):
        found = olmo.spans(f"model.layers.0.self_attn.{name}.weight", plain, (size,))
        assert found == (Span(0, 0, size // 2), Span(0, size // 2, size))
    # Of one head's size: each head's own norm, which all ranks have.
    qwen = Division({**LLAMA, "model_type": "qwen3"}, 2)
    assert qwen.spans("model.layers.0.self_attn.q_norm.weight", plain, (16,)) is None


def test_what_load_does_not_divide_is_not_offered() -> None:
    glm = Division({**LLAMA, "model_type": "glm", "pad_token_id": 0}, 2)
    with pytest.raises(
        FormatError, match=r"rowwise_split_input in transformers' plan, which is not divided yet"
    ):
        glm.spans("model.layers.0.mlp.down_proj.weight", Node("dense", Dense("float32")), (128, 256))


class Experts(torch.nn.Module):
    """As transformers' before 5.23: every choice has an expert here."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.num_experts = weight, len(weight)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert int(index.min()) >= 0 and int(index.max()) < self.num_experts
        each = torch.einsum("th,tkho->tko", hidden, self.weight[index])
        return (weights[..., None] * each).sum(1).to(hidden.dtype)


def test_tokens_of_other_ranks_do_not_overflow_in_this_ones_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_modules, "_knows_no_expert", lambda: False)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 8, 8, generator=generator)
    hidden = torch.randn(6, 8, generator=generator)
    index = torch.tensor([[0, 2], [1, 3], [0, 1], [2, 3], [3, 0], [1, 2]])
    weights = torch.rand(6, 2, generator=generator)
    weight[0] *= 1e37
    hidden[3] *= 1e3  # tokens of experts 2 and 3 alone: those of 0 would overflow
    hidden[[0, 2, 4]] *= 1e-30
    whole = Experts(weight)(hidden, index, weights)
    assert bool(torch.isfinite(whole).all())
    parts = []
    for rank in range(2):
        part = Experts(weight[2 * rank : 2 * rank + 2])
        ranks = SimpleNamespace(sum=lambda y: y)
        divided_modules.derive(part, divided_modules.DividedExperts, first=2 * rank, ranks=ranks)
        parts.append(part(hidden, index, weights))
    torch.testing.assert_close(parts[0] + parts[1], whole)


@pytest.mark.parametrize("kind", ["gemma4_text", "dots3_note_text"])
def test_layers_with_other_heads_each_are_refused(kind: str) -> None:
    """Heads are cut alike in all layers; transformers raises a RuntimeError where it is asked for what differs."""
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the model")
    with pytest.raises(UnsupportedError, match=rf"layers of models of type '{kind}' differ in .*head"):
        Division(CONFIG_MAPPING[kind]().to_dict(), 2)


def test_a_config_whose_text_has_none_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not read the config"):
        Division({**LLAMA, "text_config": [0]}, 2)


def test_memory_that_ends_while_a_config_is_read_is_no_unknown_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension that found none failed without a word, and the model was said to be unknown to transformers."""
    from transformers import AutoConfig

    from nstf.runtime import memory_limit

    def fails(*args: Any, **settings: Any) -> Any:
        raise SystemError("error return without exception set")

    monkeypatch.setattr(AutoConfig, "for_model", fails)
    for room, error in ((True, UnsupportedError), (False, NstfError)):
        monkeypatch.setattr(memory_limit, "has_room", lambda size, room=room: room)
        with pytest.raises(error) as caught:
            text_config({"model_type": "llama"})
        assert type(caught.value) is error

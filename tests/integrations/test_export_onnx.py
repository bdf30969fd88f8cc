"""`nstf export --to onnx`, run by ONNX Runtime: a Llama graph, and the user's own file rewritten."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from export_models import TEXTS, encode, sample

import nstf.runtime
from nstf.kernels.formats import decode
from nstf.runtime.artifact import write_artifact
from nstf_convert.cli import run

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: make integrations")


def int_grid(bits: int, group: int = 32, symmetric: bool = True, scale_bits: int = 16) -> dict[str, Any]:
    return {
        "kind": "int_grid",
        "bits": bits,
        "group": group,
        "symmetric": symmetric,
        "scale_bits": scale_bits,
    }


class Decoder:
    """A model as ONNX Runtime runs it, with its cache."""

    def __init__(self, path: Path, config: Any) -> None:
        self.session, self.config = ort.InferenceSession(str(path)), config
        self.names = [output.name for output in self.session.get_outputs()]
        shape = (1, config.num_key_value_heads, 0, config.head_dim)
        self.past = {
            i.name: np.zeros(shape, np.float32) for i in self.session.get_inputs() if "past" in i.name
        }
        self.seen = 0

    def step(self, ids: list[int]) -> Any:
        """Logits [tokens, vocabulary] after the tokens before."""
        self.seen += len(ids)
        mask = np.ones((1, self.seen), np.int64)
        values = self.session.run(None, {"input_ids": np.array([ids]), "attention_mask": mask, **self.past})
        found = dict(zip(self.names, values, strict=True))
        self.past = {k.replace("present", "past_key_values"): v for k, v in found.items() if k != "logits"}
        return found["logits"][0]


@pytest.mark.parametrize(
    ("table", "layers"),
    [
        (int_grid(8), (int_grid(4), int_grid(2), int_grid(3, 64), int_grid(4, 0))),
        (int_grid(4, 32, False), (int_grid(4, 32, False), int_grid(6, 64, True, 8), int_grid(3, 32, False))),
        ({"kind": "dense"}, ({"kind": "dense"}, {"kind": "mxfp4"})),
    ],
    ids=["symmetric", "zero-points", "dense"],
)
def test_onnx_runtime_writes_the_same_greedy_tokens(
    tmp_path: Path, table: dict[str, Any], layers: tuple[dict[str, Any], ...]
) -> None:
    artifact = sample(tmp_path / "m.nstf", table, *layers)
    assert run(["export", str(artifact), "--to", "onnx", "-o", str(tmp_path / "folder")]) == 0
    model: Any = nstf.runtime.load(artifact, engine="off")
    tokenizer: Any = nstf.runtime.load_tokenizer(artifact)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
        decoder = Decoder(tmp_path / "folder" / "folder.onnx", model.config)
        found, step = list(ids), list(ids)
        while len(found) < len(expected):
            step = [int(decoder.step(step)[-1].argmax())]
            found += step
        assert found == expected


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_other_architectures_give_our_logits(tiny: ModuleType, tmp_path: Path, architecture: str) -> None:
    model = tiny.new_model(architecture, head_dim=16, tie_word_embeddings=architecture == "LlamaForCausalLM")
    artifact = tiny.write(tmp_path, model)
    assert run(["export", str(artifact), "--to", "onnx", "-o", str(tmp_path / "m.onnx")]) == 0
    ids = tiny.inputs_of(architecture)["input_ids"][0]
    ours: Any = nstf.runtime.load(artifact, engine="off")
    with torch.no_grad():
        expected = ours(ids[None]).logits[0].numpy()
    found = Decoder(tmp_path / "m.onnx", ours.config).step(ids.tolist())
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_users_file_is_rewritten_and_computes_the_decoded_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from onnx import TensorProto, helper, numpy_helper

    generator = torch.Generator().manual_seed(0)
    shapes = {"conv": (16, 8, 2, 2), "linear": (64, 32), "gemm": (24, 64), "other": (24, 24)}
    weights = {n: torch.randn(s, generator=generator) * 0.1 for n, s in shapes.items()}
    trees = {
        "conv": int_grid(4, 32),
        "linear": int_grid(3, 32, False),
        "gemm": int_grid(8, 32),
        "other": {"kind": "mxfp4"},
    }
    bias = torch.randn(24, generator=generator)
    nodes = [
        helper.make_node("Conv", ["x", "conv"], ["c"], kernel_shape=[2, 2]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Concat", ["f", "f", "f", "f"], ["w"], axis=1),
        helper.make_node("MatMul", ["w", "linear"], ["m"]),
        helper.make_node("Concat", ["m", "m"], ["mm"], axis=1),
        helper.make_node("Gemm", ["mm", "gemm", "bias"], ["g"], transB=1),
        helper.make_node("MatMul", ["g", "other"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "net",
        [value("x", TensorProto.FLOAT, ["n", 8, 4, 4])],
        [value("y", TensorProto.FLOAT, ["n", 24])],
        [numpy_helper.from_array(v.numpy(), n) for n, v in {**weights, "bias": bias}.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    source = tmp_path / "net.onnx"
    onnx.save_model(model, str(source))
    encoded = {n: encode(w, **trees[n]) for n, w in weights.items()}
    from export_models import dense

    write_artifact(tmp_path / "m.nstf", {**encoded, "bias": dense(bias)}, {}, {})
    words = ["export", str(tmp_path / "m.nstf"), "--to", "onnx", "-o", str(tmp_path / "out.onnx")]
    assert run([*words, "--source", str(source)]) == 0
    written = onnx.load(str(tmp_path / "out.onnx"))
    kinds = [node.op_type for node in written.graph.node]
    assert kinds.count("DequantizeLinear") == 2 and kinds.count("MatMulNBits") == 1 and "Gemm" not in kinds
    for name, tree in encoded.items():
        decoded = numpy_helper.from_array(decode(tree).float().numpy(), name)
        next(t for t in model.graph.initializer if t.name == name).CopyFrom(decoded)
    x = torch.randn(3, 8, 4, 4, generator=generator).numpy()
    expected = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    found = ort.InferenceSession(str(tmp_path / "out.onnx")).run(None, {"x": x})[0]
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    # Initialisers that name the same bytes again and again would each get their own.
    beside = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    del beside.graph.initializer[:]
    (tmp_path / "net.data").write_bytes(bytes(1 << 20))
    for i in range(80):
        many = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[1 << 18])
        many.data_location = TensorProto.EXTERNAL
        many.external_data.add(key="location", value="net.data")
        beside.graph.initializer.append(many)
    source.write_bytes(beside.SerializeToString())
    assert run([*words, "--source", str(source), "--overwrite"]) == 5
    assert "initialisers take 83886080 bytes of files that have 1048576" in capsys.readouterr().err
    # Another file than the one that was converted is refused.
    del model.graph.initializer[0]
    onnx.save_model(model, str(source))
    assert run([*words, "--source", str(source), "--overwrite"]) == 2

"""`--to onnx --source FILE` with sources that onnx itself does not get along with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nstf.quantizers import int_grid
from nstf.runtime.artifact import write_artifact
from nstf_convert.checkpoint import onnx_wire
from nstf_convert.cli import run
from nstf_convert.export import onnx_rewrite

onnx = pytest.importorskip("onnx")
helper, FLOAT = onnx.helper, onnx.TensorProto.FLOAT
WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The command, of an artifact whose one matrix is written as 4-bit codes."""
    encoded = int_grid.encode(WEIGHT, int_grid.Params(bits=3, group=32, symmetric=False))
    write_artifact(tmp_path / "m.nstf", {"w": encoded}, {}, {})
    return ["export", str(tmp_path / "m.nstf"), "--to", "onnx", "--source", str(tmp_path / "net.onnx")]


def source(opset: int, *more: Any) -> Any:
    """A product with the matrix, and more nodes."""
    ends = [[helper.make_tensor_value_info(name, FLOAT, ["n", 64])] for name in ("x", "y")]
    weight = onnx.numpy_helper.from_array(WEIGHT.numpy(), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"]), *more], "net", *ends, [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def test_a_converter_that_ends_its_process_is_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """onnx's reads an attribute as another type than it has: a number as a list."""
    for axes, code in (([0], 0), (5, 6)):
        model = source(12, helper.make_node("ReduceSumSquare", ["w"], ["z"], axes=axes))
        (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
        assert run([*words, "-o", str(tmp_path / f"{code}.onnx")]) == code
    assert onnx.load(str(tmp_path / "0.onnx")).opset_import[0].version == 21
    assert "cannot be raised to 21" in capsys.readouterr().err
    assert not (tmp_path / "6.onnx").exists()


def test_constants_that_lie_in_other_files_are_not_read(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """onnx would read them from any file of any size, and the export then write over it."""
    (tmp_path / "x.README.md").write_bytes(bytes(64))
    outside = onnx.TensorProto(name="c", data_type=FLOAT, dims=[16])
    outside.data_location = onnx.TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="x.README.md")
    inner = helper.make_graph([], "inner", [], [], [outside])
    for node in (
        helper.make_node("Constant", [], ["c"], value=outside),
        helper.make_node("If", ["x"], ["c"], then_branch=inner, else_branch=inner),
    ):
        (tmp_path / "net.onnx").write_bytes(source(21, node).SerializeToString())
        assert run([*words, "-o", str(tmp_path / "x.onnx"), "--overwrite"]) == 6
        assert "a constant or of a graph inside in another file" in capsys.readouterr().err
    assert (tmp_path / "x.README.md").read_bytes() == bytes(64)
    # An initialiser's file is read as a conversion reads it.
    whole = {"save_as_external_data": True, "location": "w", "size_threshold": 0}
    onnx.save_model(source(21), str(tmp_path / "net.onnx"), **whole)
    assert run([*words, "-o", str(tmp_path / "y.onnx")]) == 0
    written = onnx.load(str(tmp_path / "y.onnx"))
    assert not any(t.external_data for t in written.graph.initializer)


def test_a_graph_of_empty_messages_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each takes two bytes of the file, and two hundred of memory where onnx reads it."""
    monkeypatch.setattr(onnx_wire, "MAX_MESSAGES", 100)
    model = source(21)
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    assert run([*words, "-o", str(tmp_path / "x.onnx")]) == 0
    capsys.readouterr()
    inner = onnx.GraphProto(node=[onnx.NodeProto()] * 2000)
    dims = onnx.TensorShapeProto(dim=[onnx.TensorShapeProto.Dimension()] * 2000)
    typed = onnx.TypeProto(tensor_type=onnx.TypeProto.Tensor(shape=dims))
    sequence = onnx.TypeProto.Sequence(elem_type=typed)
    for change in (
        lambda m: m.graph.node.extend([onnx.NodeProto()] * 2000),
        lambda m: m.graph.node.append(onnx.NodeProto(attribute=[onnx.AttributeProto(g=inner)])),
        lambda m: m.graph.node.append(onnx.NodeProto(input=[""] * 2000)),
        lambda m: m.functions.append(onnx.FunctionProto(node=[onnx.NodeProto()] * 2000)),
        lambda m: m.graph.value_info.append(onnx.ValueInfoProto(type=onnx.TypeProto(sequence_type=sequence))),
    ):
        model = source(21)
        change(model)
        (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
        assert run([*words, "-o", str(tmp_path / "y.onnx")]) == 5
        assert "more messages than its" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [(OSError(5, "Input/output error"), "Input/output error"), (MemoryError(), "not enough memory")],
)
def test_a_machine_that_fails_is_no_damage_of_the_source(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    said: str,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    (tmp_path / "net.onnx").write_bytes(source(21).SerializeToString())
    monkeypatch.setattr(onnx, "load", fails)
    assert run([*words, "-o", str(tmp_path / "x.onnx")]) == 1
    monkeypatch.undo()
    # protobuf would end the process.
    monkeypatch.setattr(onnx_rewrite, "has_room", lambda size: False)
    assert run([*words, "-o", str(tmp_path / "x.onnx")]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert said in first and "not enough memory to load it" in second

"""A calibration file that is given may be a stranger's: changed with the right seal, or damaged, it ends in one line.

Everything is in `check_given`, so that most cases stop there and need no conversion.
"""

import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from small_llama import LLAMA, tensors

from nstf.errors import CorruptError
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.cli import run
from nstf_convert.pipeline.calibrate.batches import digest
from nstf_convert.pipeline.calibrate.checked import check_given
from nstf_convert.pipeline.propose.units import Unit, find_units
from nstf_convert.pipeline.store.tensorfile import TensorFile, write_tensors
from nstf_convert.streamed import StreamedModel

# What no value of the metadata may be, unless it is of that kind already.
VALUES: tuple[Any, ...] = (None, "x" * 5000, "\ud800", -1, 10**30, 1e308, math.nan, [], {}, [[]], True)
REMOVED = object()
# Any word will do there: they are told, and nothing is looked up by them.
FREE = ("device", "domains")
HEAD, TABLE = "hessian:head", "frequency:model.embed_tokens.weight"


class Made:
    """A good file, taken apart, and the model that it is of."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "bad.calibration"
        (folder / "m").mkdir()
        save_file({n: t.arrays["values"] for n, t in tensors().items()}, folder / "m" / "model.safetensors")
        (folder / "m" / "config.json").write_text(json.dumps(LLAMA))
        good = folder / "good.calibration"
        words = ["calibrate", str(folder / "m"), "-o", str(good), "--samples", "4", "--seq-len", "8"]
        assert run(words) == 0
        file = TensorFile(good)
        self.facts: dict[str, Any] = file.metadata
        self.tensors = {name: file.get(name).clone() for name in file.names()}
        with closing(open_checkpoint(str(folder / "m"))) as checkpoint:
            self.model = StreamedModel.from_checkpoint(checkpoint)
            infos = {n: (tuple(checkpoint.info(n).shape), "float32") for n in checkpoint.names()}
        self.units: dict[str, Unit] = {u.name: u for u in find_units(infos, self.model)}

    def check(self, facts: dict[str, Any] | None = None, **changes: Tensor | None) -> str:
        """What is said about the file with other metadata, or tensors; empty for a good one."""
        found = {n: v for n, v in {**self.tensors, **changes}.items() if v is not None}
        write_tensors(self.path, found, self.facts if facts is None else facts)
        return self.said()

    def said(self) -> str:
        try:
            check_given(TensorFile(self.path), self.model, self.units)
        except CorruptError as error:
            assert "\n" not in str(error) and len(str(error)) < 800
            return str(error)
        return ""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("given"))


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to every value inside, of long lists the first two."""
    yield at
    for key in (
        value if isinstance(value, dict) else range(min(len(value), 2)) if isinstance(value, list) else ()
    ):
        yield from places(value[key], (*at, key))


def changed(facts: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    out = copy.deepcopy(facts)
    inside = out
    for key in at[:-1]:
        inside = inside[key]
    if value is REMOVED:
        del inside[at[-1]]
    else:
        inside[at[-1]] = value
    return out


def test_the_file_itself_is_good(made: Made) -> None:
    assert made.check() == ""


def test_every_value_of_its_metadata_is_checked(made: Made) -> None:
    # Convert asks for the version and the checkpoint before, and says it in other words.
    asked = [at for at in places(made.facts) if at and at[0] not in ("version", "checkpoint")]
    # The job matters in its work directory alone; older files lack it and the tokenizer.
    may_go = {("source", n) for n in ("seq_len", "found_windows", "window_tokens")} | {
        ("job",),
        ("tokenizer",),
    }
    missed = []
    for at in asked:
        for value in (*VALUES, REMOVED):
            before = made.facts
            for key in at:
                before = before[key]
            of_weights = at[-2:-1] == ("weights",) and value is REMOVED
            if value is before or (value is REMOVED and at in may_go) or of_weights:
                continue
            if not made.check(changed(made.facts, at, value)):
                missed.append((at, value))
    assert missed == []
    assert "nonsense' is unknown" in made.check({**made.facts, "nonsense": 1})


def test_counts_are_compared_before_anything_of_their_length_is_made(made: Made) -> None:
    """`[{} for _ in range(10**9)]` took memory without bound."""
    for split in ("fit", "held_out", "report"):
        for count in (10**9, 3, 0):
            assert f"{split}" in made.check({**made.facts, split: count})


def shapes(value: Tensor) -> dict[str, Tensor | None]:
    """A tensor in wrong shapes and types, and of wrong numbers."""
    wrong = {
        "none": None, "empty": value.flatten()[:0], "scalar": torch.zeros(()), "flat": value[None].clone(),
        "half": value[: len(value) // 2].clone() if len(value) > 1 else torch.cat([value, value]),
        **{str(t): torch.ones(value.shape).to(t) for t in (torch.bool, torch.int8, torch.float64, torch.float8_e4m3fn)},
    }  # fmt: skip
    if value.is_floating_point():
        wrong |= {str(v): torch.full(value.shape, v) for v in (math.nan, math.inf, 3e38)}
    else:
        wrong |= {str(v): torch.full(value.shape, v, dtype=value.dtype) for v in (-1, 64, 2**40)}
    return wrong


def test_every_kind_of_tensor_is_checked(made: Made) -> None:
    seen: set[str] = set()
    missed = []
    for name, value in sorted(made.tensors.items()):
        kind = name.partition(":")[0]
        if kind in seen:
            continue
        seen.add(kind)
        # Without these a tensor counts as if nothing were known of it; a token's weight is used where there is one.
        optional = kind in ("frequency", "sensitivity", "sensitivity_in", "token_weight")
        for how, wrong in shapes(value).items():
            if (optional and how == "none") or (kind == "token_weight" and how == "half"):
                continue
            if not made.check(**{name: wrong}):
                missed.append((name, how))
    assert len(seen) == 10
    assert missed == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("fit:99:input_ids", torch.ones(1, 8, dtype=torch.int64), "batches"),
        ("fit:x:y", torch.ones(1), "batches"),
        ("fit:00:input_ids", torch.ones(1, 8, dtype=torch.int64), "batches"),
        ("held_out:0:nonsense", torch.ones(1, 8), "different inputs"),
        ("reference:99", torch.ones(8, 32), "references"),
        ("experts:x", torch.full((3,), math.nan), "no 'x'"),
        ("experts:model.layers.0.mlp", torch.ones(3), "no 'model.layers.0.mlp'"),
        ("frequency:model.layers.0.mlp.up_proj.weight", torch.ones(48) / 48, "is no table"),
        ("sensitivity:nowhere", torch.ones(3), "no tensor 'nowhere'"),
        ("hessian:nowhere", torch.eye(3), "its Hessians"),
        ("token_weight:nowhere", torch.ones(3), "token_weight:nowhere"),
        ("attention:keys", torch.ones(3), "attention is no object"),
        (":x", torch.ones(3), "tensor ':x'"),
        ("nonsense", torch.ones(3), "tensor 'nonsense'"),
    ],
)  # fmt: skip
def test_no_tensor_is_there_that_means_nothing(made: Made, name: str, value: Tensor, said: str) -> None:
    assert said in made.check(**{name: value})


def test_a_hessian_is_a_second_moment(made: Made) -> None:
    good = made.tensors[HEAD]

    def other(change: Callable[[Tensor], Any]) -> str:
        hessian = good.clone()
        change(hessian)
        return made.check(**{HEAD: hessian})

    assert "diagonal" in other(lambda h: h.diagonal().neg_())
    assert "no second moment" in other(lambda h: h[3].fill_(1e9))
    assert "no second moment" in other(lambda h: h[3, 5].add_(float(h[3, 3])))
    assert "no second moment" in other(lambda h: h[3, 5].fill_(math.nan))
    weight = "sensitivity:model.embed_tokens.weight"
    assert "beyond measure" in made.check(**{HEAD: good * 1e9, weight: made.tensors[weight] * 1e17})


def test_a_hessian_belongs_to_its_weights(made: Made) -> None:
    entries = copy.deepcopy(made.facts["hessians"])
    first, second = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
    entries[first]["weights"], entries[second]["weights"] = (
        entries[second]["weights"],
        entries[first]["weights"],
    )
    assert "is no input of" in made.check({**made.facts, "hessians": entries})
    entries = copy.deepcopy(made.facts["hessians"])
    entries[second]["weights"].append("model.layers.0.self_attn.q_proj.weight")
    assert "has not the size" in made.check({**made.facts, "hessians": entries})
    entries = copy.deepcopy(made.facts["hessians"])
    entries[first]["weights"] = ["nowhere"]
    assert "no tensor 'nowhere'" in made.check({**made.facts, "hessians": entries})


def test_a_flipped_bit_is_found(made: Made) -> None:
    """Another file was written from a damaged one, without a word."""
    made.check()
    raw = bytearray(made.path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    for name in (HEAD, "reference:0", "sensitivity:model.embed_tokens.weight", "held_out:0:input_ids"):
        damaged = bytearray(raw)
        at = json.loads(raw[8:start])[name]["data_offsets"][0]
        damaged[start + at] ^= 1
        made.path.write_bytes(damaged)
        assert "is damaged" in made.said()


def test_convert_says_it_in_one_line(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", str(made.folder / "m"), "--calibration", str(made.path), "--budget", "1.0", "-q"]
    words += ["-o", str(made.folder / "out.nstf"), "--effort", "fast"]
    for changes in ({"domains": {}}, {"held_out": 10**9}, {"source": {}}):
        made.check({**made.facts, **changes})
        assert run(words) == 5
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "is none that nstf writes" in said
    made.check()
    assert run(words) == 0


def test_inputs_that_another_model_does_not_take_are_refused(tmp_path: Path) -> None:
    """Only the model can say which images it reads: it is asked once."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 24], depths=[1, 1], num_labels=4, image_size=32
    )
    ResNetForImageClassification(config).save_pretrained(tmp_path / "m")
    good = tmp_path / "good.calibration"
    assert run(["calibrate", str(tmp_path / "m"), "-o", str(good), "--samples", "4"]) == 0
    file = TensorFile(good)
    with closing(open_checkpoint(str(tmp_path / "m"))) as checkpoint:
        model = StreamedModel.from_checkpoint(checkpoint)
        infos = {n: (tuple(checkpoint.info(n).shape), "float32") for n in checkpoint.names()}
        units = {u.name: u for u in find_units(infos, model)}
        check_given(file, model, units)
        tensors = {n: file.get(n).clone() for n in file.names()}
        images = [n for n in tensors if n.endswith(":pixel_values")]
        for shape in ((1, 5, 32, 32), (1, 3, 0, 32), (1, 3), (2, 3, 32, 32), (1, 3, 1, 1)):
            changed = {**tensors, **{n: torch.ones(shape) for n in images}}
            held = [{"pixel_values": torch.ones(shape)} for n in images if n.startswith("held_out")]
            write_tensors(tmp_path / "bad", changed, {**file.metadata, "held_out_digest": digest(held)})
            if shape == (1, 3, 1, 1):  # a convolution takes any size, and the references are pooled
                check_given(TensorFile(tmp_path / "bad"), model, units)
                continue
            with pytest.raises(CorruptError, match=r"does not take|has shape"):
                check_given(TensorFile(tmp_path / "bad"), model, units)
        other = {n.replace("pixel_values", "foo"): v for n, v in tensors.items()}
        held = [{"foo": tensors[n]} for n in sorted(images) if n.startswith("held_out")]
        write_tensors(tmp_path / "bad", other, {**file.metadata, "held_out_digest": digest(held)})
        with pytest.raises(CorruptError, match="does not take"):
            check_given(TensorFile(tmp_path / "bad"), model, units)

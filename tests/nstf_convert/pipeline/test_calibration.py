"""What a calibration file holds: three disjoint splits, their domains, their references, and what every token counts."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from nstf.analyzers.sensitivity import checkpoint_layers
from nstf_convert.pipeline import calibrate
from nstf_convert.pipeline.calibrate import gradients
from nstf_convert.pipeline.calibrate.gradients import end_loss_gradients
from nstf_convert.pipeline.calibrate.statistics import (
    calibrate_model,
    data_found,
    data_needed,
    domains,
    fit_batches,
    held_out_batches,
    report_batches,
)
from nstf_convert.pipeline.calibrate.text import Data
from nstf_convert.pipeline.calibrate.turns import Turns
from nstf_convert.pipeline.machine import torch_threads
from nstf_convert.pipeline.store.tensorfile import TensorFile
from nstf_convert.streamed import StreamedModel

from .conftest import WORDS

SPLITS = {"fit": fit_batches, "held_out": held_out_batches, "report": report_batches}


def test_the_time_that_calibrate_says_is_that_of_the_calibration_alone(small, tmp_path, monkeypatch) -> None:
    """It said what a conversion of the model would take: four times as long on 135 M parameters."""
    from nstf_convert.pipeline import Budget, ConvertOptions
    from nstf_convert.pipeline.session import Session

    seen = []

    def told(self: Session):
        seen.append(original(self))
        return seen[-1]

    original = Session._predict
    monkeypatch.setattr(Session, "_predict", told)
    calibrate(
        ConvertOptions(
            model=str(small.folder), output=tmp_path / "cal.safetensors", budget=Budget("ratio", 0.5),
            datasets=(str(small.text),), samples=4, seq_len=32,
        )
    )  # fmt: skip
    (found,) = seen
    assert found.seconds.keys() == {"calibration"} and found.total_seconds < 60
    assert found.total_seconds == found.begun + found.seconds["calibration"]


@pytest.fixture(scope="module")
def file(small, tmp_path_factory) -> TensorFile:
    """The calibration of the small model on two texts."""
    from nstf_convert.pipeline import Budget, ConvertOptions

    root = tmp_path_factory.mktemp("calibration")
    rng = random.Random(1)
    (root / "other.txt").write_text(" ".join(rng.choice(WORDS[:8]) for _ in range(3000)))
    options = ConvertOptions(
        model=str(small.folder),
        output=root / "cal.safetensors",
        budget=Budget("ratio", 0.5),
        datasets=(str(small.text), str(root / "other.txt")),
        samples=6,
        seq_len=32,
        threads=1,
    )
    return TensorFile(calibrate(options))


def test_every_split_holds_windows_of_every_dataset(file) -> None:
    for split, batches in SPLITS.items():
        labels = domains(file, split)
        assert len(labels) == len(batches(file)) > 0
        assert set(labels) == {"text.txt", "other.txt"}
        for batch, label in zip(batches(file), labels, strict=True):
            assert (int(batch["input_ids"].max()) < 10) == (label == "other.txt")


def test_no_window_is_in_two_splits(file) -> None:
    rows = [tuple(b["input_ids"][0].tolist()) for read in SPLITS.values() for b in read(file)]
    assert len(rows) == len(set(rows))


def test_both_held_out_splits_come_with_their_references(file) -> None:
    for split, prefix in (("held_out", "reference"), ("report", "report_reference")):
        for i, batch in enumerate(SPLITS[split](file)):
            assert file.get(f"{prefix}:{i}").shape == (batch["input_ids"].shape[1], 64)


def test_every_hessian_has_the_weights_of_all_fit_tokens(file) -> None:
    tokens = sum(b["input_ids"].numel() for b in fit_batches(file))
    for key, entry in file.metadata["hessians"].items():
        weights = file.get(f"token_weight:{key}")
        assert entry["tokens"] == tokens == weights.numel()
        assert float(weights.mean()) == pytest.approx(1, abs=1e-3)
        assert float(weights.min()) >= 0


def test_a_backward_pass_over_fewer_windows_weighs_no_tokens_but_counts_all_of_them(file, small) -> None:
    from nstf_convert.checkpoint import open_checkpoint

    batches = tuple(fit_batches(file))
    model = StreamedModel.from_checkpoint(open_checkpoint(str(small.folder)))
    some, every = (end_loss_gradients(model, Data(True, batches, (), {}, read=n), 0) for n in (2, None))
    assert every.token_weight and not some.token_weight
    assert data_found(*data_needed(Data(True, batches, (), {}, read=2))).read == 2
    part = end_loss_gradients(model, Data(True, batches[:2], (), {}), 0)
    assert some.sensitivity.keys() == part.sensitivity.keys()
    for name, value in part.sensitivity.items():
        assert torch.equal(some.sensitivity[name], value)
    for name, value in every.frequency.items():
        assert torch.equal(some.frequency[name], value) and not torch.equal(part.frequency[name], value)


def test_sensitivities_of_a_layer_are_the_mean_squares_of_its_gradients(file, small) -> None:
    """Against plain autograd on the whole model, with labels drawn anew: equal within sampling error."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small.folder, dtype=torch.float32)
    name = "model.layers.0.mlp.down_proj"
    total = torch.zeros(64)

    def add(grad):
        total.add_(grad[0].square().sum(0))

    def keep(module, args, out):
        out.register_hook(add)

    model.get_submodule(name).register_forward_hook(keep)
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_())
    torch.manual_seed(0)
    units = 0
    for _ in range(4):
        for batch in fit_batches(file):
            log_p = torch.log_softmax(model(**batch).logits[0], -1)
            labels = torch.multinomial(log_p.detach().exp(), 1)
            (-log_p.gather(1, labels).sum()).backward()
            units += len(log_p)
    found = file.get(f"sensitivity:{name}.weight")
    assert float(found.mean()) == pytest.approx(float(total.mean() / units), rel=0.15)


def test_batches_side_by_side_give_the_bytes_of_one_after_the_other(file, small, tmp_path) -> None:
    from nstf_convert.checkpoint import open_checkpoint

    batches = tuple(fit_batches(file))
    data = Data(True, batches, tuple(held_out_batches(file)), {}, report=tuple(report_batches(file)))
    contents = []
    for workers in (1, 3):
        model = StreamedModel.from_checkpoint(open_checkpoint(str(small.folder)))
        with torch_threads(2):
            calibrate_model(model, data, tmp_path / str(workers), {}, 0, 64, workers=workers, core_each=True)
        made = TensorFile(tmp_path / str(workers))
        contents.append(({n: made.get(n) for n in sorted(made.names())}, made.metadata))
    (one, facts), (many, same_facts) = contents
    assert facts == same_facts and one.keys() == many.keys() and len(batches) > 4
    for name, value in one.items():
        assert torch.equal(value, many[name]), name


def test_kept_activations_give_the_gradients_of_recomputed_ones(file, small, monkeypatch) -> None:
    from nstf_convert.checkpoint import open_checkpoint

    model = StreamedModel.from_checkpoint(open_checkpoint(str(small.folder)))
    data, recomputed = Data(True, tuple(fit_batches(file)), (), {}), []
    monkeypatch.setattr(
        gradients,
        "checkpoint_layers",
        lambda layers, before: recomputed.append(len(layers)) or checkpoint_layers(layers, before),
    )
    found = []
    for most in (gradients.KEPT_BYTES, 0):
        monkeypatch.setattr(gradients, "KEPT_BYTES", most)
        found.append(end_loss_gradients(model, data, 0))
    kept, again = found
    assert recomputed == [0, 2]
    for name in ("sensitivity", "token_weight", "frequency"):
        one, other = getattr(kept, name), getattr(again, name)
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[n]) for n, value in one.items())


def test_batches_add_in_their_order_whoever_is_there_first() -> None:
    layers = [nn.Identity(), nn.Identity()]
    turns = Turns(layers, {"a": 0, "b": 1}.get)
    order: list[tuple[str, int]] = []
    arrived = threading.Event()

    def run(index: int) -> None:
        with turns.running(index):
            if index == 0:
                arrived.wait()  # until the others stand before the first key
            if index != 1:  # which passes its layer without the module
                with turns.turn("a"):
                    order.append(("a", index))
            layers[0](0)
            if index == 2:
                return  # as when it fails
            with turns.turn("b"):
                order.append(("b", index))

    with ThreadPoolExecutor(4) as pool:
        later = [pool.submit(run, i) for i in (3, 2, 1)]
        first = pool.submit(run, 0)
        arrived.set()
        for future in (first, *later):
            future.result(timeout=60)
    turns.close()
    assert [i for key, i in order if key == "a"] == [0, 2, 3]
    assert [i for key, i in order if key == "b"] == [0, 1, 3]
    assert not layers[0]._forward_hooks


def test_weights_stay_while_any_thread_holds_them(small, monkeypatch) -> None:
    from nstf_convert import streamed
    from nstf_convert.checkpoint import open_checkpoint

    monkeypatch.setattr(streamed, "RESIDENT_BYTES", 0)
    model = StreamedModel.from_checkpoint(open_checkpoint(str(small.folder)))
    layer = next(module for _, module, _ in model.linear_modules())
    assert layer.weight.is_meta
    with model.holding(layer):
        with model.holding(layer):
            pass
        layer(torch.zeros(1, layer.weight.shape[1]))
        assert not layer.weight.is_meta
    assert layer.weight.is_meta

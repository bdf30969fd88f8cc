"""A mix that is encoded for the original model's inputs, without its Hessians: the same as with them, in whatever order."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from nstf.quantizers.rounding import shuffle_columns
from nstf_convert.checkpoint import memory
from nstf_convert.pipeline import convert
from nstf_convert.pipeline import session as sessions
from nstf_convert.pipeline.calibrate import make as calibrations
from nstf_convert.pipeline.improve import original_inputs
from nstf_convert.pipeline.improve import together as sizes
from nstf_convert.pipeline.improve.original_inputs import encode_for_originals
from nstf_convert.pipeline.machine import Machine, machine
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.session import Session

# Matrices of whole segments of 256 rows, which can be searched under one another.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def opened(options, tmp_path):
    """Makes a Session on the small model; keyword arguments override options."""
    jobs = []

    def make(work="work", **changes) -> Session:
        session = Session(options(work_dir=tmp_path / work, **changes), Stages())
        jobs.append(session)
        return session

    yield make
    for session in reversed(jobs):
        session._opened.close()


def mixed(session: Session) -> dict[str, Recipe]:
    """Shuffle codes of two rates, and integers in one group of the first layer."""
    names = [n for n, u in session.units.items() if u.kept is None]
    mix = {n: Recipe("shuffle", {"quarter_bits": 14 if ".1.mlp" in n else 12}) for n in names}
    whole = Recipe("int_grid", {"bits": 8, "group": 32})
    return mix | {n: whole for n in names if ".0.mlp.down" in n or "embed" in n}


@pytest.fixture
def wide(opened, tmp_path):
    """Makes a Session on a model of wider layers."""
    import transformers

    torch.manual_seed(0)
    folder = tmp_path / "wide"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE)).save_pretrained(folder)
    return lambda work: opened(work, model=str(folder), datasets=(), samples=4, seq_len=16)


def arrays_of(session: Session, mix: dict[str, Recipe]) -> dict[str, dict[str, torch.Tensor]]:
    found = encode_for_originals(session, mix, lambda unit: None)
    assert sorted(found.results) == sorted(mix)
    return {n: found.load(session.units[n], mix[n]).arrays for n in mix}


def same(a: Any, b: Any) -> bool:
    return sorted(a) == sorted(b) and all(torch.equal(a[n][k], b[n][k]) for n in a for k in a[n])


@pytest.fixture
def together(monkeypatch) -> list[list[int]]:
    """The work is put together as for a GPU; what is filled with the rows of each search of a block of columns."""
    monkeypatch.setattr(Machine, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(Machine, "resident_bytes", property(lambda self: 0))
    monkeypatch.setattr(Machine, "scratch_bytes", property(lambda self: 1 << 28))
    monkeypatch.setattr(Machine, "activation_bytes", property(lambda self: 1 << 28))
    monkeypatch.setattr(memory, "for_gpu", nullcontext)
    monkeypatch.setattr(Session, "compile_ahead", lambda self: None)
    monkeypatch.setattr(sizes, "room_bytes", lambda machine, activations: 1 << 40)
    searched = []
    real = shuffle_columns.Search.steps

    def steps(self):
        searched.append([stack.rows for stack in self.stacks])
        return real(self)

    monkeypatch.setattr(shuffle_columns.Search, "steps", steps)
    return searched


def test_it_gives_what_the_calibrations_hessians_give(opened) -> None:
    session = opened()
    mix = mixed(session)
    kept = session.encoder.encode_all([(session.units[n], r) for n, r in mix.items()], lambda unit: None)
    found = encode_for_originals(session, mix, lambda unit: None)
    assert DOWN in found.keys
    for name in mix:
        assert found.results[name].loss == pytest.approx(kept[name].loss, rel=0.02), name


def test_groups_of_several_layers_are_searched_at_the_same_time_to_the_same_bytes(
    wide, together, monkeypatch
) -> None:
    session = wide("together")
    mix = mixed(session)
    at_once = arrays_of(session, mix)
    # By width and rate: q, k and v under one another, and o, of all layers, gate and up of two, and the head, which is less
    # than a segment, last; gate and up of the other layer, and down of both that have codes.
    alike = [*[3 * 256] * 3, *[256] * 3, *[2 * 512] * 2, 64]
    assert sorted(map(sorted, together)) == sorted([sorted(alike), [2 * 512], [256], [256]])
    assert all(rows % 256 == 0 for stacks in together for rows in stacks[:-1])
    monkeypatch.setattr(sizes, "room_bytes", lambda machine, activations: 1)
    together.clear()
    assert same(at_once, arrays_of(wide("apart"), mix))
    assert all(len(stacks) == 1 for stacks in together) and len(together) == 3 + 3 + 3 + 2 + 1


def test_too_little_memory_for_all_that_waits_is_no_failure(opened, together, monkeypatch) -> None:
    session = opened("whole")
    mix = mixed(session)
    expected = arrays_of(session, mix)
    real, failed = original_inputs.recipes.encode_many, []

    def encode_many(items, scratch, room):
        if len(items) > 4:
            failed.append(len(items))
            raise torch.OutOfMemoryError("too much")
        return real(items, scratch, room)

    monkeypatch.setattr(original_inputs.recipes, "encode_many", encode_many)
    assert same(expected, arrays_of(opened("short"), mix))
    assert len(failed) > 1


def test_an_interrupted_run_goes_on_to_the_same_bytes_and_a_second_one_runs_no_model(
    opened, monkeypatch
) -> None:
    whole = opened("whole")
    mix = mixed(whole)
    expected = arrays_of(whole, mix)
    session = opened("cut")
    real, calls = original_inputs._Pass._keep, []

    def stop(self, *args):
        calls.append(args)
        if len(calls) > 5:
            raise KeyboardInterrupt
        real(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(original_inputs._Pass, "_keep", stop)
        with pytest.raises(KeyboardInterrupt):
            arrays_of(session, mix)
    assert same(expected, arrays_of(session, mix))
    monkeypatch.setattr(original_inputs, "run_in_step", lambda *args: pytest.fail("the model was run again"))
    assert same(expected, arrays_of(session, mix))


def test_bytes_do_not_depend_on_threads(opened) -> None:
    one = opened("one", threads=1)
    two = opened("two", threads=2, calibration=one.work.path / "calibration.safetensors")
    mix = mixed(one)
    assert same(arrays_of(one, mix), arrays_of(two, mix))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("gpu", [False, True])
def test_another_mix_finds_the_groups_that_it_stores_alike(opened, together, monkeypatch, gpu) -> None:
    if not gpu:
        monkeypatch.setattr(Machine, "on_gpu", property(lambda self: False))
    session = opened()
    mix = mixed(session)
    arrays_of(session, mix)
    other = mix | {DOWN.replace("down", "up"): Recipe("shuffle", {"quarter_bits": 10})}
    encoded = []
    real = original_inputs._Pass._keep

    def keep(self, unit, *args):
        encoded.append(unit.name)
        real(self, unit, *args)

    monkeypatch.setattr(original_inputs._Pass, "_keep", keep)
    arrays_of(session, other)
    # On a GPU gate and up share a search, if they have one rate.
    beside = [DOWN.replace("down", "gate")] if gpu else []
    assert sorted(encoded) == [*beside, DOWN.replace("down", "up")]


def test_a_share_of_the_weights_is_encoded_alone(opened) -> None:
    session = opened()
    mix = mixed(session)
    part = encode_for_originals(session, mix, lambda unit: None, 0.2)
    assert 0 < len([n for n in part.results if n in part.keys]) < len(part.keys)
    assert DOWN not in part.results


def test_as_many_groups_are_encoded_at_a_time_as_the_memory_holds() -> None:
    # A layer of 8 B: q, k and v; o; gate and up; down.
    layer = [(4096, 25 << 20), (4096, 16 << 20), (4096, 112 << 20), (14336, 56 << 20)]
    room = 22 << 30
    found = sizes.turns(32 * layer, room)
    assert [g for turn in found for g in turn] == 32 * layer
    assert all(sizes.taken_bytes(turn) <= room for turn in found)
    assert all(sizes.taken_bytes([*a, b[0]]) > room for a, b in pairwise(found))
    assert 10 <= len(found) <= 12
    assert sizes.turns(layer, 1) == [[group] for group in layer]
    # The factor of a wide group counts where it is more than the search.
    assert sizes.taken_bytes([(1 << 14, 1 << 20)]) == (12 + 20) * (1 << 28) + 4 * (1 << 20)


def test_a_fast_conversion_without_hessians_gives_the_same_bytes_with_more_threads_and_devices(
    options, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(calibrations, "HESSIAN_BYTES", 1000)
    chosen = options(
        ("ratio", 0.4), effort="fast", formats=("shuffle", "int_grid"), output=tmp_path / "a.nstf"
    )
    report = convert(chosen).report
    assert "encode" in [s["name"] for s in report["stages"]]
    assert "encode front to back" not in [s["name"] for s in report["stages"]]
    convert(replace(chosen, output=tmp_path / "b.nstf", threads=2))
    cpu = torch.device("cpu")
    monkeypatch.setattr(sessions, "machine", lambda *wanted: replace(machine(*wanted), devices=(cpu, cpu)))
    encoded = []
    real = original_inputs._Pass.run

    def run(self, batches):
        encoded.append(self.mix)
        real(self, batches)

    monkeypatch.setattr(original_inputs._Pass, "run", run)
    convert(replace(chosen, output=tmp_path / "c.nstf"))
    assert len(encoded) == 1, "the other device encodes the single format"
    first, *others = [(tmp_path / f"{name}.nstf").read_bytes() for name in "abc"]
    assert all(other == first for other in others)

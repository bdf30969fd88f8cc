"""Healing: codes stay, what is continuous moves towards the original, and nothing gets worse or larger."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from nstf.kernels.formats import EncodedTensor, Node, decode, dense
from nstf.kernels.formats.tuning import prepare, tunable
from nstf.quantizers.stats import Stats
from nstf.runtime.skeleton import build_skeleton
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.calibrate.statistics import fit_batches, held_out_batches
from nstf_convert.pipeline.heal import model as heal_model
from nstf_convert.pipeline.heal import run as healing
from nstf_convert.pipeline.heal.heal import Settings, heal
from nstf_convert.pipeline.heal.teacher import Targets, batch_of
from nstf_convert.pipeline.heal.text import healing_windows
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.session import Session
from nstf_convert.streamed import StreamedModel

INT3 = Recipe("int_grid", {"bits": 3, "group": 32})
QUICK = Settings(scale_rate=3e-3, row_rate=3e-3, value_rate=3e-3, evaluations=2)


@pytest.fixture
def session(options, tmp_path):
    with Session(options(work_dir=tmp_path / "work"), Stages()) as opened:
        yield opened


def uniform(session, recipe=INT3):
    return {n: recipe for n, u in session.units.items() if u.kept is None}


def test_healing_lowers_the_divergence_of_windows_that_neither_fitted_nor_chose(session) -> None:
    mix = uniform(session)
    learning = replace(QUICK, scale_rate=1e-2, row_rate=1e-2, value_rate=1e-2, windows=4)
    healed = heal(session, mix, 1.0, steps=30, settings=learning)
    assert healed.after.score < 0.9 * healed.before.score
    load = mixes.encoder_loader(session)
    before, after = (
        mixes.measure(session, mix, "report", given).score for given in (load, healed.loader(load))
    )
    assert after < 0.95 * before
    assert healed.facts["kept"] and healed.facts["steps"] == 30
    assert [e["step"] for e in healed.facts["curve"]] == [15, 30]


def test_healed_tensors_keep_their_codes_trees_dtypes_and_sizes(session) -> None:
    mix = uniform(session, Recipe("int_grid", {"bits": 3, "group": 32, "scale_bits": 8}))
    healed = heal(session, mix, 1.0, steps=8, settings=QUICK)
    load = mixes.encoder_loader(session)
    assert any("norm" in name for name in healed.encoded)
    for name, tensor in healed.encoded.items():
        before = load(session.units[name], mix.get(name))
        assert tensor.tree == before.tree and tensor.shape == before.shape
        for key, array in before.arrays.items():
            assert (tensor.arrays[key].dtype, tensor.arrays[key].shape) == (array.dtype, array.shape)
            assert key != "codes" or torch.equal(tensor.arrays[key], array)


def test_what_the_curve_says_is_what_the_written_tensors_measure(session) -> None:
    healed = heal(session, uniform(session), 1.0, steps=8, settings=QUICK)
    best = min(e["held_out"] for e in healed.facts["curve"])
    assert healed.after.score == pytest.approx(best, rel=1e-4)


def test_a_run_that_makes_things_worse_is_not_kept(session) -> None:
    wild = replace(QUICK, scale_rate=3.0, row_rate=3.0, value_rate=3.0)
    healed = heal(session, uniform(session), 1.0, steps=4, settings=wild)
    assert healed.encoded == {}
    assert healed.after == healed.before and not healed.facts["kept"]


def test_the_same_number_of_steps_gives_the_same_bytes(options, tmp_path) -> None:
    found = []
    for name in ("a", "b"):
        with Session(options(work_dir=tmp_path / name), Stages()) as session:
            healed = heal(session, uniform(session), 1.0, steps=6, settings=QUICK)
            found.append(healed.encoded)
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert all(torch.equal(a, found[1][name].arrays[k]) for k, a in tensor.arrays.items())


def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(session, options, tmp_path, monkeypatch) -> None:
    whole = heal(session, uniform(session), 1.0, steps=8, settings=QUICK).encoded
    monkeypatch.setattr(healing, "CHECKPOINT_SECONDS", 0.0)
    with Session(options(work_dir=tmp_path / "other"), Stages()) as again:
        mix = uniform(again)
        original = healing.HealingRun._one_step
        steps = []

        def failing(self, batch, ahead=(), take=True):
            if len(steps) == 5:
                raise KeyboardInterrupt
            steps.append(1)
            return original(self, batch, ahead, take)

        monkeypatch.setattr(healing.HealingRun, "_one_step", failing)
        with pytest.raises(KeyboardInterrupt):
            heal(again, mix, 1.0, steps=8, settings=QUICK)
        monkeypatch.setattr(healing.HealingRun, "_one_step", original)
        resumed = heal(again, mix, 1.0, steps=8, settings=QUICK)
    assert resumed.facts["steps"] == 8
    for name, tensor in whole.items():
        assert all(torch.equal(a, resumed.encoded[name].arrays[k]) for k, a in tensor.arrays.items())


@pytest.mark.parametrize("room", [2, 5, 100])
def test_windows_are_computed_beside_the_same_others_after_an_interruption(room: int) -> None:
    """Of another number of rows a product has other last bits."""

    class Teacher:
        def hidden(self, ids: torch.Tensor) -> torch.Tensor:
            return ids.float().sum() + torch.zeros(len(ids), 4, 1)

    windows = [torch.full((1, 4), 1 << i) for i in range(8)]

    def targets() -> Targets:
        return Targets(Teacher(), torch.device("cpu"), nullcontext, room * 16)  # type: ignore[arg-type]

    def given(step: int) -> tuple:
        return batch_of(windows, 0, step, 1), batch_of(windows, 0, step + 1, 1, 2)

    whole = targets()
    expected = [float(whole.of(*given(step))[0]) for step in range(30)]
    assert len(set(expected)) > 2
    for killed in range(30):
        again = targets()
        for step in range(killed):
            again.pass_over(*given(step))
        assert [float(again.of(*given(step))[0]) for step in range(killed, 30)] == expected[killed:]


def test_steps_are_sized_to_the_time(session) -> None:
    healed = heal(session, uniform(session), 0.02, settings=QUICK)
    assert 2 <= healed.facts["steps"] <= healed.facts["planned_steps"]
    assert healed.facts["minutes"] < 0.5


def test_low_rank_factors_and_tables_are_tuned_too(session) -> None:
    factor = Recipe("dense", {"dtype": "float16"})
    hybrid = Recipe("add", {}, {"base": INT3, "correction": Recipe("svd", {"rank": 4}, {"factor": factor})})
    mix = uniform(session)
    name, other = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    mix |= {name: hybrid, other: Recipe("grid16", {"group": 32})}
    healed = heal(session, mix, 1.0, steps=8, settings=QUICK)
    before = mixes.encoder_loader(session)(session.units[name], hybrid)
    changed = {k for k, a in before.arrays.items() if not torch.equal(a, healed.encoded[name].arrays[k])}
    assert {"x.scale", "y.a.values", "y.b.values"} <= changed and "x.codes" not in changed
    tables = [
        e.arrays["table"]
        for e in (mixes.encoder_loader(session)(session.units[other], mix[other]), healed.encoded[other])
    ]
    assert not torch.equal(*tables)


def test_recomputed_layers_give_the_same_gradients(session, monkeypatch) -> None:
    mix = uniform(session)
    run = healing.HealingRun(
        session, mix, mixes.encoder_loader(session), 1.0, 2, QUICK, mixes.measure(session, mix)
    )
    batch = run._batch(run.fit, 0)
    gradients = []
    for limit in (1 << 40, 0):
        monkeypatch.setattr(healing, "ACTIVATION_BYTES", limit)
        with run._recomputing():
            run._one_step(batch, take=False)
        gradients.append([p.grad.clone() for p in run.values.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(*gradients, strict=True))


def test_gradients_are_those_of_the_plain_model(session, small) -> None:
    """Against transformers' own forward, with every weight decoded and kept."""
    from transformers import AutoModelForCausalLM

    mix = uniform(session)
    load = mixes.encoder_loader(session)
    run = healing.HealingRun(session, mix, load, 1.0, 2, QUICK, mixes.measure(session, mix))
    run.bfloat16, run.student.dtype = False, torch.float32
    batch = run._batch(run.fit, 0)
    loss = run._one_step(batch, take=False)
    plain = AutoModelForCausalLM.from_pretrained(small.folder, dtype=torch.float32)
    values = run.values.current()
    with torch.no_grad():
        target = plain(batch[0]).logits[0].log_softmax(-1)
        for name, p in plain.named_parameters():
            p.copy_(decode(load(session.units[name], mix.get(name))))
    q = plain(batch[0]).logits[0].log_softmax(-1)
    divergence = (target.exp() * (target - q)).sum(-1).mean()
    divergence.backward()
    assert loss == pytest.approx(float(divergence.detach()), rel=1e-4)
    name = "model.layers.0.mlp.down_proj.weight"
    scale = values[name]["scale"]
    prepared = run.student._weights[name]
    units = prepared.decode({"scale": torch.ones_like(scale)})
    weight = dict(plain.named_parameters())[name]
    # d/d(log scale) of the row: all its groups together.
    wanted = (weight.grad * units * scale.detach().repeat_interleave(32, 1)).sum(1)
    found = run.values._row[name, "scale"].grad[:, 0]
    assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-6)


class Given(StreamedModel):
    """A model whose weights are the given parameters, by stored name."""

    dtype = torch.float32

    def __init__(self, config: dict, given: dict[str, torch.nn.Parameter]) -> None:
        self.given = given
        super().__init__(config, given.__getitem__, lazy=True)

    def _attach(self, module: torch.nn.Module, names: dict[str, str]) -> None:
        for local, stored in names.items():
            module._parameters[local] = self.given[stored]


def test_an_untied_head_learns_in_every_step() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    ).to_dict()  # fmt: skip
    torch.manual_seed(0)
    shapes = {n: p.shape for n, p in build_skeleton(config).named_parameters()}
    weights = {n: torch.nn.Parameter(torch.randn(s) / 4) for n, s in shapes.items()}
    teacher = StreamedModel(config, {n: w.detach() + 0.1 for n, w in weights.items()}.__getitem__)
    student = Given(config, weights)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        target = teacher.hidden(ids)[0]
    for _ in range(3):
        for w in weights.values():
            w.grad = None
        hidden = student.hidden(ids)[0]
        heal_model.backward_of_divergence(teacher, target, student, hidden, 4)
        assert all(w.grad is not None and bool(w.grad.any()) for w in weights.values())


def test_layers_before_a_head_get_the_gradients_of_all_rows() -> None:
    """ModernBERT's decoder has a layer and a norm there, whose values are decoded once for all rows of logits."""
    from transformers import ModernBertDecoderConfig

    config = ModernBertDecoderConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        architectures=["ModernBertDecoderForCausalLM"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ).to_dict()  # fmt: skip
    torch.manual_seed(0)
    tree = Node("dense", dense.Params("float32"))
    names = StreamedModel(config, lambda name: torch.empty(0), lazy=True).stored_parameters()
    shapes = {n: p.shape for n, p in build_skeleton(config).named_parameters() if n in names}
    weights = {n: torch.randn(s) / 4 for n, s in shapes.items()}
    encoded = {n: EncodedTensor(tree, tuple(w.shape), {"values": w}) for n, w in weights.items()}
    teacher = StreamedModel(config, {n: w + 0.1 for n, w in weights.items()}.__getitem__)
    cpu = torch.device("cpu")
    student = heal_model.TunedModel(
        config, {n: prepare(e) for n, e in encoded.items()}, teacher._ties, cpu, torch.float32
    )
    ids, found = torch.arange(8)[None] + 3, []
    for rows in (3, 8):
        tuned = {n: torch.ones((), requires_grad=True) for n in weights}
        student.set_values({n: {"values": w * tuned[n]} for n, w in weights.items()})
        with torch.no_grad():
            target = teacher.hidden(ids)[0]
        heal_model.backward_of_divergence(teacher, target, student, student.hidden(ids)[0], rows)
        found.append([t.grad for t in tuned.values()])
    for one, other in zip(*found, strict=True):
        assert one is not None and torch.allclose(one, other, rtol=1e-4, atol=1e-7)
    assert found[0][list(weights).index("lm_head.dense.weight")].abs() > 0


def test_experts_two_stacks_in_one_module_get_their_own_gradients() -> None:
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=40, hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, architectures=["MixtralForCausalLM"],
    ).to_dict()  # fmt: skip
    torch.manual_seed(0)
    shapes = {n: tuple(p.shape) for n, p in build_skeleton(config).named_parameters()}
    dense = Recipe("dense", {"dtype": "float32"})
    encoded = {
        n: recipes.encode(dense, torch.randn(s) / 8, Stats(), max(1, len(s) - 1)) for n, s in shapes.items()
    }
    device = torch.device("cpu")
    student = heal_model.TunedModel(
        config, {n: prepare(e) for n, e in encoded.items()}, {}, device, torch.float32
    )
    ids, found = torch.arange(8)[None], []
    for forget in (False, True):
        values = {
            n: {k: v.clone().requires_grad_() for k, v in tunable(e).items()} for n, e in encoded.items()
        }
        student.set_values(values)
        with student.forgetting_weights() if forget else nullcontext():
            student.hidden(ids).square().sum().backward()
        found.append({n: v["values"].grad for n, v in values.items() if "experts" in n})
    assert len(found[0]) == 2
    assert all(torch.allclose(g, found[1][n]) for n, g in found[0].items())


def test_more_text_leaves_out_what_is_held_out(session) -> None:
    fit = [b["input_ids"] for b in fit_batches(session.calibration)]
    more = healing_windows(session, fit, 60)
    assert len(more) > len(fit)
    held = {
        tuple(b["input_ids"][0, i : i + 16].tolist())
        for b in held_out_batches(session.calibration)
        for i in range(17)
    }
    for window in more:
        assert held.isdisjoint({tuple(window[0, i : i + 16].tolist()) for i in range(17)})


def test_a_model_that_cannot_be_run_is_not_healed(session) -> None:
    session.model = None
    with pytest.raises(ValueError, match="needs a model that can be run"):
        heal(session, {}, 1.0)

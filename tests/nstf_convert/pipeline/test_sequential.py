"""A mix that is encoded front to back: which inputs every tensor is rounded for, and that the bytes are fixed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nstf.kernels.formats import decode
from nstf_convert import streamed
from nstf_convert.pipeline.calibrate.statistics import fit_batches
from nstf_convert.pipeline.improve import front_to_back as sequential
from nstf_convert.pipeline.improve.front_to_back import encode_in_prefix
from nstf_convert.pipeline.machine import Machine
from nstf_convert.pipeline.mix import weights_of
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.workdir import STORE, remove
from nstf_convert.streamed import StreamedModel

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GEMMA = {**TEXT, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
LAST_DOWN = "model.layers.1.mlp.down_proj.weight"
ALBERT = {**TEXT, "embedding_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 64}
MIXTRAL = {**TEXT, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}

RESNET = {
    "embedding_size": 32,
    "hidden_sizes": [32, 64],
    "depths": [1, 1],
    "layer_type": "basic",
    "image_size": 32,
    "num_labels": 8,
}


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


def saved(folder: Path, architecture: str, config: str, arguments: dict[str, Any]) -> Path:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, architecture)(getattr(transformers, config)(**arguments))
    model.save_pretrained(folder)
    return folder


def three_bits(session: Session) -> dict[str, Recipe]:
    recipe = Recipe("int_grid", {"bits": 3, "group": 32})
    return {n: recipe for n, u in session.units.items() if u.kept is None}


def encoded(session: Session) -> dict[str, dict[str, torch.Tensor]]:
    mix = three_bits(session)
    prefixed = encode_in_prefix(session, mix, lambda unit: None)
    assert sorted(prefixed.results) == sorted(mix)
    return {n: prefixed.load(session.units[n], mix[n]).arrays for n in mix}


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(a[n][k], b[n][k]) for n in a for k in a[n]) and sorted(a) == sorted(b)


def inputs_of(model: StreamedModel, path: str, session: Session) -> torch.Tensor:
    """Rows that reach a module over all fit batches, [n, in]."""
    rows = []
    module = dict(model.module.named_modules())[path]
    handle = module.register_forward_pre_hook(lambda m, args: rows.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in fit_batches(session.calibration):
            model.hidden(batch["input_ids"])
    handle.remove()
    return torch.cat(rows)


@pytest.mark.parametrize("resident", [0, 1 << 20], ids=["streamed", "resident"])
def test_every_tensor_is_rounded_for_what_its_compressed_predecessors_give(
    opened, monkeypatch, resident
) -> None:
    monkeypatch.setattr(streamed, "RESIDENT_BYTES", resident)
    session = opened()
    seen = {}
    real = sequential._Pass._encode

    def encode(self, names, weights, shares, stats):
        seen.update((name, stats.hessian) for name in names)
        real(self, names, weights, shares, stats)

    monkeypatch.setattr(sequential._Pass, "_encode", encode)
    mix = three_bits(session)
    prefixed = encode_in_prefix(session, mix, lambda unit: None)
    model = StreamedModel(
        session.reference().config,
        weights_of(session, mix, prefixed.loader()),
        session.checkpoint.ties,
    )
    for name in (LAST_DOWN, "model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        rows = inputs_of(model, name.removesuffix(".weight"), session)
        used = seen[name]
        key = session.statistics.group_of(session.units[name])
        weights = session.calibration.get(f"token_weight:{key}")
        wanted = (rows * weights[:, None]).T @ rows / weights.sum()
        share = session.calibration.metadata["hessians"][key]["shrinkage"]
        wanted = wanted.lerp(torch.diag(wanted.diagonal()), share)
        # Products may round their inputs to bfloat16; the original model's Hessian is further away than that.
        original = session.calibration.get(f"hessian:{key}")
        assert (used - wanted).norm() < 0.01 * wanted.norm()
        assert (used - wanted).norm() < 0.2 * (used - original).norm()


def test_bytes_do_not_depend_on_threads_or_on_the_run(opened, monkeypatch) -> None:
    monkeypatch.setattr(streamed, "RESIDENT_BYTES", 0)
    one = opened("one", threads=1)
    two = opened("two", threads=2, calibration=one.work.path / "calibration.safetensors")
    assert same(encoded(one), encoded(two))
    assert torch.get_num_threads() == 2


def test_second_run_finds_everything_and_runs_no_model(opened, monkeypatch) -> None:
    session = opened()
    first = encoded(session)
    monkeypatch.setattr(sequential, "run_in_step", lambda *args: pytest.fail("the model was run again"))
    assert same(first, encoded(session))


def test_interrupted_run_goes_on_to_the_same_bytes(opened, monkeypatch) -> None:
    whole = encoded(opened("whole"))
    session = opened("cut", calibration=None)
    real, calls = sequential.recipes.encode_many, []

    def stop(*args):
        calls.append(args)
        if len(calls) > 12:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(sequential.recipes, "encode_many", stop)
    with pytest.raises(KeyboardInterrupt):
        encoded(session)
    monkeypatch.setattr(sequential.recipes, "encode_many", real)
    assert same(whole, encoded(session))


def test_on_a_gpu_weights_that_were_encoded_together_are_so_again(opened, monkeypatch) -> None:
    """They are stored one by one, and a call of fewer rows may end with other last bits."""
    session = opened("whole")
    monkeypatch.setattr(Machine, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(Machine, "scratch_bytes", property(lambda self: 1 << 28))
    real, calls = sequential.recipes.encode_many, []

    def watched(items, *rest):
        calls.append(len(items))
        return real(items, *rest)

    monkeypatch.setattr(sequential.recipes, "encode_many", watched)
    whole = encoded(session)
    together = list(calls)
    assert max(together) > 1
    # Killed between two puts of a group of several.
    keys = encode_in_prefix(session, three_bits(session), lambda unit: None).keys
    remove(session.work._file(keys["model.layers.1.self_attn.k_proj.weight"], STORE))
    calls.clear()
    assert same(whole, encoded(session)) and calls == [3]


def test_tied_table_is_encoded_as_without_the_prefix(opened) -> None:
    session = opened()
    mix = three_bits(session)
    prefixed = encode_in_prefix(session, mix, lambda unit: None)
    table = session.units["model.embed_tokens.weight"]
    assert table.name not in prefixed.keys
    assert LAST_DOWN in prefixed.keys
    recipe = mix[table.name]
    assert same({"": prefixed.load(table, recipe).arrays}, {"": session.encoder.load(table, recipe).arrays})


def test_untied_head_reads_the_compressed_models_hidden_states(opened, tmp_path) -> None:
    folder = saved(
        tmp_path / "m", "Gemma3ForCausalLM", "Gemma3TextConfig", {**GEMMA, "tie_word_embeddings": False}
    )
    session = opened(model=str(folder), datasets=(), samples=4, seq_len=16)
    mix = three_bits(session)
    prefixed = encode_in_prefix(session, mix, lambda unit: None)
    assert "lm_head.weight" in prefixed.keys
    alone = session.encoder.load(session.units["lm_head.weight"], mix["lm_head.weight"])
    after = prefixed.load(session.units["lm_head.weight"], mix["lm_head.weight"])
    assert not torch.equal(decode(alone), decode(after))


def test_layers_that_run_several_times_keep_the_calibrations_hessians(opened, tmp_path) -> None:
    folder = saved(tmp_path / "m", "AlbertModel", "AlbertConfig", ALBERT)
    inputs = tmp_path / "inputs.safetensors"
    from safetensors.torch import save_file

    save_file({"input_ids": torch.arange(8 * 16).reshape(8, 16) % 100}, str(inputs))
    session = opened(model=str(folder), datasets=(str(inputs),), formats=("int_grid",))
    mix = three_bits(session)
    prefixed = encode_in_prefix(session, mix, lambda unit: None)
    assert not any("albert_layers" in name for name in prefixed.keys)
    assert sorted(prefixed.results) == sorted(mix)


def test_convolutions_are_covered(opened, tmp_path) -> None:
    folder = saved(tmp_path / "m", "ResNetForImageClassification", "ResNetConfig", RESNET)
    session = opened(model=str(folder), datasets=(), samples=8)
    mix = three_bits(session)
    prefixed = encode_in_prefix(session, mix, lambda unit: None)
    assert sorted(prefixed.results) == sorted(mix)
    kinds = {len(session.units[name].shape) for name in prefixed.keys}
    assert kinds == {4}


def test_expert_stacks_keep_the_calibrations_hessians_and_attention_does_not(opened, tmp_path) -> None:
    folder = saved(tmp_path / "m", "MixtralForCausalLM", "MixtralConfig", MIXTRAL)
    session = opened(model=str(folder), datasets=(), samples=4, seq_len=16)
    prefixed = encode_in_prefix(session, three_bits(session), lambda unit: None)
    assert not any("experts" in name for name in prefixed.keys)
    assert "model.layers.1.self_attn.o_proj.weight" in prefixed.keys


def test_corrected_target_is_nearer_to_what_the_original_gives(opened, monkeypatch) -> None:
    session = opened(samples=40)
    targets = []
    real = sequential.recipes.encode_many

    def encode_many(items, scratch):
        targets.extend(weight for _, weight, _, _ in items)
        return real(items, scratch)

    monkeypatch.setattr(sequential.recipes, "encode_many", encode_many)
    mix = three_bits(session)
    prefixed = encode_in_prefix(session, mix, lambda unit: None)
    model = StreamedModel(
        session.reference().config,
        weights_of(session, mix, prefixed.loader()),
        session.checkpoint.ties,
    )
    path = LAST_DOWN.removesuffix(".weight")
    original, compressed = inputs_of(session.reference(), path, session), inputs_of(model, path, session)
    norm = "model.layers.1.post_attention_layernorm"
    lag = inputs_of(session.reference(), norm, session) - inputs_of(model, norm, session)
    weight = session.source(LAST_DOWN).float()
    wanted = original @ weight.T + lag
    target = targets[-1]
    assert target.shape == weight.shape
    assert (compressed @ target.T - wanted).norm() < 0.99 * (compressed @ weight.T - wanted).norm()

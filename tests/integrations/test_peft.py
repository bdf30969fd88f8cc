"""Adapters on an encoded base with the real PEFT: training, saving, loading, what is refused."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nstf.runtime
from nstf.errors import UnsupportedError

peft = pytest.importorskip("peft", reason="PEFT is not installed: make integrations")


PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def attached(path: Path, **settings: Any) -> Any:
    """A loaded model with LoRA on its projections; B starts at random, so that every gradient is nonzero."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(nstf.runtime.load(path, **settings), config)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("engine", ["auto", "off"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_adapters_are_those_on_the_dense_model(
    tiny: ModuleType, tmp_path: Path, engine: str, tied: bool, device: str
) -> None:
    dense = tiny.new_model("LlamaForCausalLM", tie_word_embeddings=tied)
    path = tiny.write(tmp_path, dense)
    model = attached(path, engine=engine, device=device, dtype=torch.float32)
    torch.manual_seed(1)
    twin = peft.get_peft_model(dense, model.peft_config["default"]).to(device)
    ids = tiny.inputs_of("LlamaForCausalLM")["input_ids"].to(device)
    for each in (model, twin):
        each.train()
        each(input_ids=ids, labels=ids).loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    expected = {n: p.grad for n, p in twin.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys() and len(found) == 2 * 3 * 2
    # The GPU's kernels multiply float32 activations in shorter forms.
    bound = 1e-3 if device == "cpu" else 2e-2
    for name, grad in expected.items():
        assert float(grad.abs().max()) > 0
        assert float((found[name] - grad).norm() / grad.norm()) < bound, name


@pytest.mark.parametrize("device", PLACES)
def test_training_with_checkpointing_lowers_the_loss_and_leaves_the_base(
    tiny: ModuleType, tmp_path: Path, device: str
) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    model = attached(path, device=device)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    model.train()
    before = {n: b.clone() for n, b in model.named_buffers()}
    ids = tiny.inputs_of("LlamaForCausalLM")["input_ids"].to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(12):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


def test_the_trainer_trains_and_goes_on_from_its_checkpoint(tiny: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: make integrations")
    import transformers

    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    rows = torch.randint(3, 100, (8, 7), generator=torch.Generator().manual_seed(0)).tolist()
    data: Any = [{"input_ids": row, "labels": row} for row in rows]

    def train(steps: int, again: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "trained"), max_steps=steps, per_device_train_batch_size=4, learning_rate=0.01,
            lr_scheduler_type="constant", save_steps=4, logging_steps=1, report_to=[], use_cpu=True,
            gradient_checkpointing=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        model = attached(path)
        model.enable_input_require_grads()
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=again)
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(logged) == steps and logged[-1] < logged[0]
        return logged[-1], {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    train(4)
    saved = tmp_path / "trained" / "checkpoint-4"
    assert (saved / "adapter_model.safetensors").is_file() and not (saved / "model.safetensors").exists()
    resumed, values = train(8, again=True)
    straight, expected = train(8)
    assert resumed == pytest.approx(straight, rel=1e-3)
    assert all(torch.allclose(values[name], expected[name], atol=1e-4) for name in expected)


def test_an_adapter_is_saved_beside_the_file_and_loads_back(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    model = attached(path).eval()
    folder = tmp_path / "model.adapter"
    model.save_pretrained(folder)
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", ".md", ".safetensors"]
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
    again = peft.PeftModel.from_pretrained(nstf.runtime.load(path), folder)
    ids = tiny.inputs_of("LlamaForCausalLM")["input_ids"]
    with torch.no_grad():
        base, expected, found = nstf.runtime.load(path)(ids).logits, model(ids).logits, again(ids).logits
    assert torch.equal(found, expected) and not torch.allclose(found, base, atol=1e-3)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    # The engine knows the base alone: generation with the adapter goes through the modules.
    expected_text = model.generate(input_ids=ids[:1], **options)
    assert torch.equal(again.generate(input_ids=ids[:1], **options), expected_text)
    step = model(expected_text[:, :-1]).logits[:, ids.shape[1] - 1 :].argmax(-1)
    assert torch.equal(step, expected_text[:, ids.shape[1] :])


def test_the_share_of_trainable_parameters_is_that_of_the_dense_model(
    tiny: ModuleType, tmp_path: Path
) -> None:
    dense = tiny.new_model("LlamaForCausalLM")
    model = attached(tiny.write(tmp_path, dense))
    twin = peft.get_peft_model(dense, model.peft_config["default"])
    assert model.get_nb_trainable_parameters() == twin.get_nb_trainable_parameters()
    assert model.num_parameters() == twin.num_parameters()


def test_merging_into_the_encoded_base_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    model = attached(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")))
    for safe in (False, True):
        with pytest.raises(UnsupportedError, match=r"To merge an adapter.*nstf export"):
            model.merge_adapter(safe_merge=safe)


def test_oft_is_not_merged_into_a_copy_and_comes_off(tiny: ModuleType, tmp_path: Path) -> None:
    """OFT writes through `weight.data`: the write was lost, and the adapter taken for merged. Taking one off, of any kind
    but LoRA, was an AttributeError."""
    base = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM")))
    ids = tiny.inputs_of("LlamaForCausalLM")["input_ids"]
    before = base(ids).logits
    config = peft.OFTConfig(r=0, oft_block_size=8, target_modules=["q_proj"], init_weights=False)
    model = peft.get_peft_model(base, config).eval()
    adapted = model(ids).logits
    with pytest.raises(UnsupportedError, match=r"To merge an adapter.*nstf export"):
        model.merge_adapter()
    assert torch.equal(model(ids).logits, adapted) and not torch.equal(adapted, before)
    assert torch.equal(model.unload()(ids).logits, before)

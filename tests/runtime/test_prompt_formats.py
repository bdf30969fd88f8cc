"""Prompts of a captured decoder in every format: replayed, they give the logits of prompts that are not captured.

On a GPU the exact equality of integers is checked, and of other formats that they differ by less than roundings to 16 bits
make of it.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import nstf.runtime
from nstf.runtime.graph_decoder import Decoder
from nstf.runtime.graph_prompt import STEP
from nstf.runtime.prompt_attention import prompt_attention

sys.path.insert(0, str(Path(__file__).parent))
import code_cases
from code_cases import SMALL

Step = Callable[[], None]


def ids_of(count: int, batch: int = 1, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randint(3, 128, (batch, count), generator=torch.Generator().manual_seed(seed)).to(device)


def difference(found: Tensor, expected: Tensor) -> float:
    """Of logits, relative to the expected ones' size."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", sorted(code_cases.FORMATS))
def test_prompts_of_every_format_are_filled_up_and_captured(name: str, tmp_path: Path) -> None:
    model: Any = nstf.runtime.load(code_cases.write(tmp_path / "m.nstf", name, **SMALL), engine="off")
    captured: list[Step] = []

    def capture(step: Step) -> Step:
        step()
        captured.append(step)
        return step

    seen: list[Any] = []
    decoder = Decoder(model, capture)
    ids = ids_of(30)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        model.model.embed_tokens.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
        for _ in range(3):
            assert difference(decoder.prompt(ids), expected) < 1e-5
    assert len(captured) == 1 and set(seen) == {(1, STEP)}


def test_attention_of_a_prompt_does_not_ask_whether_a_graph_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 makes a mask then, with which another kernel attends."""
    model: Any = nstf.runtime.load(code_cases.write(tmp_path / "m.nstf", "int4", **SMALL), engine="off")
    real, masks = torch.nn.functional.scaled_dot_product_attention, []

    def noted(*arguments: Any, **options: Any) -> Tensor:
        masks.append(options.get("attn_mask"))
        return real(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    decoder: Any = Decoder(model, lambda step: step)
    decoder._prompts._longest = 0  # by the modules
    ids = ids_of(30)
    with torch.no_grad():
        expected = decoder.prompt(ids).clone()
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert torch.equal(decoder.prompt(ids), expected)
    assert masks and all(mask is None for mask in masks)
    assert model.config._attn_implementation == "sdpa"


def test_windows_and_padding_keep_their_masks(tmp_path: Path) -> None:
    changes = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 20}
    path = code_cases.write(tmp_path / "m.nstf", "int4", **SMALL, **changes)
    model: Any = nstf.runtime.load(path, engine="off")
    ids, ones = ids_of(30, 2), torch.ones(2, 30, dtype=torch.int64)
    padded = ones.clone()
    padded[1, :5] = 0
    with torch.no_grad():
        for mask in (None, ones, padded):
            expected = model(ids, attention_mask=mask).logits
            with prompt_attention(model.config):
                assert torch.equal(model(ids, attention_mask=mask).logits, expected)
        model.set_attn_implementation("eager")
        with prompt_attention(model.config):
            assert model.config._attn_implementation == "eager"


def test_the_attention_is_given_back_after_an_error() -> None:
    config = transformers.LlamaConfig(attn_implementation="sdpa")
    with pytest.raises(ValueError, match="in the middle"), prompt_attention(config):
        assert config._attn_implementation != "sdpa"
        raise ValueError("in the middle")
    assert config._attn_implementation == "sdpa"


def test_what_is_set_during_a_prompt_stays_and_configs_inside_are_left_alone() -> None:
    text = transformers.LlamaConfig(attn_implementation="sdpa")
    with prompt_attention(text):
        text._attn_implementation = "eager"
    assert text._attn_implementation == "eager"
    both = transformers.LlavaConfig(attn_implementation="sdpa")
    both.vision_config._attn_implementation = "eager"
    with prompt_attention(both):
        assert both.vision_config._attn_implementation == "eager" != both._attn_implementation
    assert both._attn_implementation == "sdpa"
    assert both.vision_config._attn_implementation == "eager"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(code_cases.FORMATS))
def test_replayed_prompts_on_a_gpu_are_those_that_are_not_captured(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """`pytest -s` prints the differences. In bfloat16 logits of such models move by about 1 % where some numbers round
    otherwise (docs/scale.md)."""
    path = code_cases.write(tmp_path / "m.nstf", name)
    model: Any = nstf.runtime.load(path, "cuda", dtype=dtype)
    graphs: Any = Decoder(model)
    plain: Any = Decoder(model, lambda step: step)  # the same filled-up prompt, launch by launch
    # The modules' own prompt is not filled up: products of fewer rows take other kernels.
    bound, modules = (1e-4, 1e-3) if dtype == torch.float32 else (2e-2, 5e-2)
    worst = 0.0
    with torch.no_grad():
        # One launch of codes' own kernels, several, and the library's products of decoded weights; several sequences.
        for batch, count in ((1, 20), (1, 100), (1, 500), (4, 130)):
            for seed in range(4):
                ids = ids_of(count, batch, seed, "cuda")
                expected, found = plain.prompt(ids).clone(), graphs.prompt(ids).clone()
                worst = max(worst, difference(found, expected))
                if name == "int4":
                    assert torch.equal(found, expected)
                assert difference(found, model(ids, logits_to_keep=1).logits[:, -1]) < modules
                ours, theirs = (d._state.cache[:, :, :, :, :count] for d in (graphs, plain))
                assert difference(ours, theirs) < bound
                # A replay gives the same bits each time.
                assert seed == 0 or torch.equal(graphs.prompt(ids), found)
            assert len(graphs._prompts._graphs) >= 1
    print(f"{name}, {dtype}: replayed prompts differ by {worst:.1e} at most")
    assert worst < bound


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rotated trellis", "shuffle"])
def test_texts_on_a_gpu_go_on_from_a_replayed_prompt(name: str, tmp_path: Path) -> None:
    """Tokens in float32, where only a tie could differ."""
    path = code_cases.write(tmp_path / "m.nstf", name)
    model: Any = nstf.runtime.load(path, "cuda", dtype=torch.float32)
    graphs: Any = Decoder(model)
    plain = Decoder(model, lambda step: step)
    with torch.no_grad():
        for count in (50, 40, 60):
            ids = ids_of(count, device="cuda")
            assert list(graphs.generate(ids, 20)) == list(plain.generate(ids, 20))
    assert len(graphs._prompts._graphs) == 1


@pytest.mark.gpu
def test_decoded_weights_of_a_layer_take_the_memory_of_those_before(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    path = code_cases.write(tmp_path / "m.nstf", "trellis", **sizes, num_hidden_layers=16)
    model: Any = nstf.runtime.load(path, "cuda", dtype=torch.bfloat16)
    decoder, ids = Decoder(model), ids_of(512, device="cuda")
    projections = [m for name, m in model.named_modules() if name.endswith("_proj")]
    decoded = sum(2 * m.out_features * m.in_features for m in projections)
    with torch.no_grad():
        decoder.prompt(ids)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        decoder.prompt(ids)
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before < decoded / 2

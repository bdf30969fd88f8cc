"""A streamed model computes what the model itself does."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nstf.analyzers.same_draws import SameDraws
from nstf.analyzers.sensitivity import checkpoint_layers
from nstf.errors import CorruptError
from nstf_convert.gates.sides import Side
from nstf_convert.streamed import RESIDENT_BYTES, StreamedModel

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(4, 16),
    "rand in float64": lambda: torch.rand(64, dtype=torch.float64, device="cpu"),
    "randn": lambda: torch.randn((64,)),
    "rand_like": lambda: torch.rand_like(torch.zeros(64)),
    "randn_like": lambda: torch.randn_like(torch.zeros(64), dtype=torch.float64),
    "randint": lambda: torch.randint(0, 1000, (64,)),
    "randint_like": lambda: torch.randint_like(torch.zeros(64), 0, 1000),
    "randperm": lambda: torch.randperm(64),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(64), 32),
    "normal_": lambda: torch.empty(64).normal_(),
    "uniform_": lambda: torch.empty(64).uniform_(),
    "poisson": lambda: torch.poisson(torch.full((64,), 9.0)),
    "rand_like by name": lambda: torch.rand_like(input=torch.zeros(64)),
    "exponential_": lambda: torch.empty(64).exponential_(),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(64), 0.5, training=True),
}


def test_stored_buffers_are_those_of_the_checkpoint() -> None:
    """A batch normalisation's mean and variance: without them a convolutional network is another one."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    model = ResNetForImageClassification(config).eval()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(len(name))) + 0.5)
    stated = {**config.to_dict(), "architectures": ["ResNetForImageClassification"]}
    held = model.state_dict()
    streamed = StreamedModel(stated, held.__getitem__)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted = model(pixel_values=x).logits
        assert torch.allclose(streamed.outputs(pixel_values=x), wanted, rtol=1e-5, atol=1e-6)
    parameters = dict(model.named_parameters())
    with pytest.raises(
        CorruptError, match=r"'resnet\S+running_mean' is missing, a statistic of a \w*BatchNorm"
    ):
        StreamedModel(stated, parameters.__getitem__, held=parameters, lazy=True)


def test_weights_that_their_model_writes_into_are_those_of_the_checkpoint() -> None:
    """RWKV halves weights in place before its first pass; those that are read later were left as they are."""
    from transformers import RwkvConfig, RwkvForCausalLM

    torch.manual_seed(0)
    config = RwkvConfig(
        vocab_size=50, hidden_size=288, num_hidden_layers=3, rescale_every=1, context_length=32
    )
    model = RwkvForCausalLM(config).eval()
    held = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.arange(8)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        stated = {**config.to_dict(), "architectures": ["RwkvForCausalLM"]}
        found = StreamedModel(stated, held.__getitem__).outputs(input_ids=ids)
    # The norms' epsilon weighs more beside halved values.
    assert (found - wanted).abs().max() < 0.01 * wanted.abs().max()


@pytest.mark.parametrize("name", ["Mamba", "FalconMamba"])
def test_weights_that_a_parent_reads_are_those_of_the_checkpoint(name: str) -> None:
    """Of Mamba's `dt_proj` the mixer takes the weight and calls no module: above 256 KiB it was on the meta device."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=50, hidden_size=768, num_hidden_layers=1)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    held = model.state_dict()
    assert held["backbone.layers.0.mixer.dt_proj.weight"].nbytes > RESIDENT_BYTES
    ids = torch.arange(16)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        stated = {**config.to_dict(), "architectures": [f"{name}ForCausalLM"]}
        streamed = StreamedModel(stated, held.__getitem__)
        found = streamed.outputs(input_ids=ids)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert streamed.module.get_parameter("backbone.layers.0.mixer.dt_proj.weight").is_meta


# How each goes from its last hidden states to logits: as it says, transformed before the head, or scaled and capped.
LANGUAGE: dict[str, dict[str, Any]] = {
    "Llama": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},  # its class calls a part of its base
    "Llama4Text": {"intermediate_size_mlp": 48, "num_local_experts": 2},  # states a base that it has not
    "ModernBertDecoder": {},  # a dense layer and a norm
    "Roberta": {"is_decoder": True, "pad_token_id": 1},
    "RemBert": {"is_decoder": True, "output_embedding_size": 40},  # another width
    "RecurrentGemma": {"logits_soft_cap": 2.0, "lru_width": 32, "num_hidden_layers": 3},
    "Gemma2": {"final_logit_softcapping": 2.0},
    "Granite": {"logits_scaling": 3.0},
    "Inkling": {"logits_mup_width_multiplier": 5.0},  # divides what the head reads
    "CpmAnt": {},  # takes no embeddings
}


@pytest.mark.parametrize("name", LANGUAGE)
def test_logits_are_those_of_the_models_own_class(name: str) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.5,
    }
    kind = "InklingText" if name == "Inkling" else name
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **LANGUAGE[name]})
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    held, ids = dict(model.state_dict()), torch.arange(8)[None] + 3
    streamed = StreamedModel(
        {**config.to_dict(), "architectures": [type(model).__name__]}, held.__getitem__, held=held
    )
    with torch.no_grad():
        wanted = model(input_ids=ids).logits[0]
        hidden = streamed.hidden(ids)[0]
        found, read = streamed.logits(hidden), streamed.head_inputs(hidden)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert read.shape[-1] == LANGUAGE[name].get("output_embedding_size", hidden.shape[-1])
    assert (read is hidden) == (name not in ("ModernBertDecoder", "Roberta", "RemBert"))


def test_torchs_own_attention_has_the_weights_of_the_checkpoint() -> None:
    """It takes the weight of `out_proj`, too; SigLIP pools by it."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(0)
    config = SiglipVisionConfig(
        hidden_size=288,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=32,
        patch_size=16,
    )
    model, pixels = SiglipVisionModel(config).eval(), torch.randn(1, 3, 32, 32)
    stated = {**config.to_dict(), "architectures": ["SiglipVisionModel"]}
    with torch.no_grad():
        wanted = model(pixel_values=pixels).pooler_output
        found = StreamedModel(stated, model.state_dict().__getitem__).module(pixel_values=pixels)
    assert torch.allclose(found.pooler_output, wanted, rtol=1e-4, atol=1e-5)


def test_a_fault_in_a_source_is_no_missing_buffer() -> None:
    """A KeyError from inside a source was once taken for a buffer that it does not have."""
    stated, held = small_clap()

    def source(name: str) -> torch.Tensor:
        return {}["inside"] if name == TYPES else held[name]

    with pytest.raises(KeyError, match="inside"):
        StreamedModel(stated, source, held=held)


def test_integer_buffers_are_those_of_the_checkpoint() -> None:
    stated, held = small_clap()
    changed = {**held, TYPES: torch.ones_like(held[TYPES])}
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        first, other = (
            StreamedModel(stated, h.__getitem__, held=h).outputs(input_ids=ids) for h in (held, changed)
        )
        assert not torch.allclose(first, other, atol=1e-2)
        # One that the source lacks stays as the model's code makes it, and is named.
        without = {n: v for n, v in held.items() if n != TYPES}
        same = StreamedModel(stated, without.__getitem__, held=without)
        assert same.missing_buffers == [TYPES] and TYPES not in same.stored_buffers()
        assert same.missing_said == f"lacks 1 buffer, the code's own are used: {TYPES}"
        same.missing_buffers = ["a", "b", "c", "d"]
        assert same.missing_said == "lacks 4 buffers, the code's own are used: a, b, c, ..."
        assert torch.equal(same.outputs(input_ids=ids), first)


def test_a_side_of_a_comparison_says_which_buffers_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    stated, held = small_clap()
    without = {n: v for n, v in held.items() if n != TYPES}
    source = SimpleNamespace(
        limits=None, config=stated, get=without.__getitem__, ties={}, names=lambda: list(without)
    )
    Side("./model", source).model()
    assert f"./model lacks 1 buffer, the code's own are used: {TYPES}" in caplog.text


TYPES = "embeddings.token_type_ids"


def small_clap() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config, tensors) of a model with integers among its buffers: the type that it takes each token for."""
    from transformers import ClapTextConfig, ClapTextModel

    torch.manual_seed(0)
    config = ClapTextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, type_vocab_size=2, projection_dim=8,
    )  # fmt: skip
    model = ClapTextModel(config).eval()
    with torch.no_grad():
        model.embeddings.token_type_embeddings.weight.normal_()
    return {**config.to_dict(), "architectures": ["ClapTextModel"]}, model.state_dict()


def vit_mae() -> StreamedModel:
    """Of two layers; its masks are drawn in every forward pass."""
    from transformers import ViTMAEConfig, ViTMAEModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTMAEConfig(**sizes, image_size=32, patch_size=8)
    stated = {**config.to_dict(), "architectures": ["ViTMAEModel"]}
    return StreamedModel(stated, ViTMAEModel(config).eval().state_dict().__getitem__)


def test_models_that_draw_random_numbers_draw_the_same_ones_each_time() -> None:
    """Masks of ViTMAE were others in every forward pass: two runs of a conversion gave other bytes, and a mix was compared
    with an original that saw other patches."""
    first, second = vit_mae(), vit_mae()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted = first.outputs(pixel_values=x)
        torch.rand(7)
        state = torch.get_rng_state()
        for streamed in (first, second):
            assert torch.equal(streamed.outputs(pixel_values=x), wanted)
        with ThreadPoolExecutor(4) as pool:
            assert all(
                torch.equal(y, wanted) for y in pool.map(lambda _: first.outputs(pixel_values=x), range(8))
            )
        assert torch.equal(torch.get_rng_state(), state), "the caller's own numbers go on"
    assert not first._drawless


def test_threads_that_wait_for_each_other_in_their_forward_passes_go_on() -> None:
    """Front to back all batches come to a gate before one goes on: a lock over the first pass was never opened."""
    streamed, gate = vit_mae(), Barrier(2)
    layer = next(m for m in streamed.module.modules() if type(m).__name__ == "ViTMAELayer")

    def meet(*_: Any) -> None:
        gate.wait(timeout=60)

    layer.register_forward_pre_hook(meet)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: streamed.outputs(pixel_values=x), range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", sorted(DRAWS))
def test_every_way_to_draw_gives_the_same_numbers(name: str) -> None:
    draw = DRAWS[name]
    with SameDraws() as first:
        one, more = draw(), draw()
    torch.rand(3)
    with SameDraws():
        two = draw()
    assert first.drew and torch.equal(one, two) and not torch.equal(one, more)
    torch.manual_seed(0)
    plain = draw()
    assert plain.shape == one.shape and plain.dtype == one.dtype
    torch.manual_seed(0)
    assert torch.equal(draw(), plain), "outside of the block torch's own generator is drawn from"
    if name == "dropout":
        assert set(one.unique().tolist()) == {0.0, 2.0}
    with SameDraws() as idle:
        torch.rand(3, device="meta"), torch.rand_like(torch.zeros(3, device="meta"))
        torch.nn.functional.dropout(torch.ones(8), 0.5, training=False)
    assert not idle.drew


def test_models_that_draw_for_long_texts_alone_draw_the_same_numbers() -> None:
    """A first pass of a short text had said of Reformer that it draws none."""
    from transformers import ReformerConfig, ReformerModel

    config = ReformerConfig(
        attention_head_size=16, hidden_size=32, num_attention_heads=2, vocab_size=64, attn_layers=["lsh"],
        num_hidden_layers=1,
        axial_pos_embds=False, max_position_embeddings=256, lsh_attn_chunk_length=16, num_buckets=4, feed_forward_size=32,
    )  # fmt: skip
    model = ReformerModel(config).eval()
    streamed = StreamedModel(
        {**config.to_dict(), "architectures": ["ReformerModel"]}, model.state_dict().__getitem__
    )
    with torch.no_grad():
        streamed.outputs(input_ids=torch.arange(8)[None])
        long = torch.randint(0, 64, (1, 128))
        assert torch.equal(streamed.outputs(input_ids=long), streamed.outputs(input_ids=long))


def test_layers_that_are_computed_again_draw_what_they_drew() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5)).train()
    x = torch.randn(4, 16)

    def gradient(again: bool) -> torch.Tensor:
        layer.zero_grad()
        undo = checkpoint_layers([layer]) if again else None
        with SameDraws() as draws:
            y = layer(x)
        assert draws.drew
        torch.rand(3)
        y.sum().backward()
        if undo is not None:
            undo()
        return layer[0].weight.grad.clone()

    assert torch.equal(gradient(True), gradient(True)) and torch.equal(gradient(True), gradient(False))

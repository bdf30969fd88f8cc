"""Models whose embeddings, layers or inputs are unlike Llama's are calibrated and converted all the same."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from nstf.errors import UnsupportedError, UsageError
from nstf.runtime import load
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.made_up import longest_window
from nstf_convert.pipeline import calibrate, convert
from nstf_convert.pipeline.calibrate import gradients, make
from nstf_convert.pipeline.calibrate.checked import check_given
from nstf_convert.pipeline.calibrate.one_input import one_input
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.tensorfile import TensorFile
from nstf_convert.streamed import StreamedModel

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
OPT = {**TEXT, "ffn_dim": 96, "max_position_embeddings": 64, "word_embed_proj_dim": 64, "bos_token_id": 1}
GEMMA = {**TEXT, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
TINY = Path(__file__).parents[3] / "examples" / "tiny_llama" / "model"
WHISPER = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "max_source_positions": 50,
    "begin_suppress_tokens": None,
}
PROPHETNET = {
    "hidden_size": 64,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": 1024,
    "max_position_embeddings": 32,
}
WAV2VEC2 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "conv_dim": (32, 32),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}


@pytest.fixture(autouse=True)
def as_of_large_models(monkeypatch) -> None:
    """Layers are computed again in the backward pass, as those of models of a useful size are."""
    monkeypatch.setattr(gradients, "KEPT_BYTES", 0)


def saved(folder: Path, architecture: str, config: str, arguments: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(getattr(transformers, config)(**arguments))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def chosen(options, tmp_path):
    """Makes ConvertOptions for a model without a dataset, of few and short windows."""
    settings = {"datasets": (), "samples": 4, "seq_len": 16}
    return lambda folder, **changes: options(("ratio", 0.9), model=str(folder), **{**settings, **changes})


@pytest.fixture
def calibrated(chosen, tmp_path, monkeypatch):
    """Converts a model and gives back its calibration, which could be given to another conversion."""
    made = make.make

    def checked(session: Session, model: StreamedModel) -> TensorFile:
        file = made(session, model)
        check_given(file, model, session.units)
        return file

    monkeypatch.setattr(make, "make", checked)

    def run(folder: Path) -> TensorFile:
        assert convert(chosen(folder, work_dir=tmp_path / "work")).output.exists()
        return TensorFile(tmp_path / "work" / "calibration.safetensors")

    return run


def test_position_table_that_is_given_a_mask_is_not_counted(calibrated, tmp_path) -> None:
    file = calibrated(saved(tmp_path / "m", "OPTForCausalLM", "OPTConfig", OPT))
    assert file.find("frequency:model.decoder.embed_tokens.weight") is not None
    assert file.find("frequency:model.decoder.embed_positions.weight") is None


def test_scaled_embedding_counts_by_its_scale(calibrated, chosen, tmp_path, monkeypatch) -> None:
    from nstf_convert.pipeline.calibrate import gradients

    folder = saved(tmp_path / "m", "Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA)
    name = "sensitivity_in:model.embed_tokens.weight"
    scaled = calibrated(folder).get(name)
    monkeypatch.setattr(gradients, "_embedding_scale", lambda module: 1.0)
    plain = TensorFile(calibrate(chosen(folder, output=tmp_path / "plain"))).get(name)
    assert torch.allclose(scaled, plain * 64.0)


def test_encoder_decoder_is_given_decoder_inputs(calibrated, tmp_path) -> None:
    folder = saved(tmp_path / "m", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER)
    file = calibrated(folder)
    assert "model.decoder.layers.1.fc1.weight" in str(file.metadata["hessians"])


def test_a_model_of_depths_is_compared_by_them(calibrated, tmp_path) -> None:
    sizes = {
        "hidden_sizes": [16, 32, 32, 64],
        "num_attention_heads": [1, 2, 2, 4],
        "depths": [1, 1, 1, 1],
        "decoder_hidden_size": 32,
        "image_size": 64,
    }
    file = calibrated(saved(tmp_path / "m", "GLPNForDepthEstimation", "GLPNConfig", sizes))
    assert file.get("reference:0").numel() == 64 * 64


def test_layers_that_nothing_is_known_of_are_refused(chosen, tmp_path) -> None:
    """I-BERT's matrices are of classes of its own, beside buffers as large as they are."""
    sizes = {**TEXT, "vocab_size": 2048, "max_position_embeddings": 66}
    folder = saved(tmp_path / "m", "IBertForMaskedLM", "IBertConfig", sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    text = Path(__file__).parents[3] / "examples" / "data" / "prose.txt"
    with pytest.raises(UnsupportedError, match="none of the layers that nstf knows"):
        convert(chosen(folder, datasets=(str(text),)))


def test_layers_that_go_back_in_training_alone_are_refused(chosen, tmp_path) -> None:
    """Reformer's reversible layers assert that: an AssertionError, exit code 1."""
    sizes = {
        "hidden_size": 32, "attn_layers": ["local", "lsh"], "num_attention_heads": 2, "feed_forward_size": 64,
        "vocab_size": 2048, "is_decoder": True, "axial_pos_embds": False, "max_position_embeddings": 64,
        "attention_head_size": 16, "num_buckets": 2, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8,
    }  # fmt: skip
    folder = saved(tmp_path / "m", "ReformerModelWithLMHead", "ReformerConfig", sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    text = Path(__file__).parents[3] / "examples" / "data" / "prose.txt"
    with pytest.raises(UnsupportedError, match="no gradients outside of training"):
        convert(chosen(folder, datasets=(str(text),)))


def test_answers_that_begin_with_no_token_of_the_model_are_refused(chosen, tmp_path) -> None:
    start = {"decoder_start_token_id": 5000}
    folder = saved(tmp_path / "m", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER | start)
    with pytest.raises(UnsupportedError, match="token 5000, with which answers begin"):
        convert(chosen(folder))


@pytest.mark.parametrize("kind", ["ForConditionalGeneration", "ForCausalLM"])
def test_a_decoder_that_foretells_several_tokens_is_measured(calibrated, chosen, tmp_path, kind: str) -> None:
    """ProphetNet looks up a position more than a text has, and scores tokens by other states than its last."""
    folder = saved(tmp_path / "m", f"ProphetNet{kind}", "ProphetNetConfig", PROPHETNET)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    assert "decoder.layers.0" in str(calibrated(folder).metadata["hessians"])
    with open_checkpoint(folder) as checkpoint:
        model = StreamedModel.from_checkpoint(checkpoint)
        assert not model.is_causal_lm and longest_window(model) == 30


@pytest.mark.parametrize("layers", [1, 3])
def test_layer_that_runs_several_times_sees_all_its_inputs(tmp_path, layers) -> None:
    from transformers import AlbertConfig, AlbertModel

    from nstf_convert.pipeline.calibrate.statistics import calibrate_model
    from nstf_convert.pipeline.calibrate.text import Data
    from nstf_convert.streamed import StreamedModel

    torch.manual_seed(0)
    config = AlbertConfig(**{**TEXT, "embedding_size": 32, "num_hidden_layers": layers})
    module = AlbertModel(config)
    weights = module.state_dict()
    model = StreamedModel({**config.to_dict(), "architectures": ["AlbertModel"]}, weights.__getitem__)
    batches = tuple({"input_ids": torch.randint(3, 100, (1, 16))} for _ in range(4))
    data = Data(False, batches[:3], batches[3:], {})
    calibrate_model(model, data, tmp_path / "c", {}, 0)
    hessians = TensorFile(tmp_path / "c").metadata["hessians"]
    key = next(k for k in hessians if k.endswith("ffn"))
    assert hessians[key]["tokens"] == 3 * 16 * layers


def test_a_head_behind_a_layer_of_another_width_has_the_moments_of_what_it_reads(
    calibrated, chosen, tmp_path
) -> None:
    """RemBERT's was given those of the last hidden states: a ValueError about their width."""
    sizes = {**TEXT, "bos_token_id": 1, "eos_token_id": 2, "output_embedding_size": 80, "is_decoder": True}
    folder = saved(tmp_path / "m", "RemBertForCausalLM", "RemBertConfig", sizes)
    file = calibrated(folder)
    assert file.metadata["hessians"]["head"]["weights"] == ["cls.predictions.decoder.weight"]
    assert file.get("hessian:head").shape[-1] == 80
    assert convert(chosen(folder, prefix=True, output=tmp_path / "prefix.nstf")).output.exists()


def test_experts_that_are_given_their_rows_side_by_side_are_converted(calibrated, tmp_path) -> None:
    """Llama 4's are called without the numbers of the chosen ones: a KeyError."""
    sizes = {**GEMMA, "num_local_experts": 4, "intermediate_size_mlp": 96, "pad_token_id": 0}
    folder = saved(tmp_path / "m", "Llama4ForCausalLM", "Llama4TextConfig", sizes)
    tokens = calibrated(folder).get("experts:model.layers.0.feed_forward.experts")
    assert len(tokens) == 4 and tokens.sum() == 4 * 16


@pytest.mark.parametrize("kind", ["Wav2Vec2", pytest.param("Hubert", marks=pytest.mark.slow), "WavLM"])
def test_a_weight_that_is_computed_of_others_is_converted_and_runs(kind, chosen, tmp_path) -> None:
    """The convolution of positions has its weight from a magnitude and a direction: pricing it was a KeyError."""
    folder = saved(tmp_path / "m", f"{kind}ForCTC", f"{kind}Config", WAV2VEC2)
    sound = torch.randn(24, 800)
    save_file({"input_values": sound}, tmp_path / "sound.safetensors")
    made = convert(
        chosen(folder, work_dir=tmp_path / "work", datasets=(str(tmp_path / "sound.safetensors"),))
    )
    original, loaded = getattr(transformers, f"{kind}ForCTC").from_pretrained(folder), load(made.output)
    positions: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    with torch.no_grad():
        for model in (original.eval(), loaded):
            positions.append(model.base_model.encoder.pos_conv_embed.conv.weight)
            logits.append(model(sound[:2]).logits)
    assert torch.equal(*positions)
    assert (logits[1] - logits[0]).norm() < 0.03 * logits[0].norm()


VISION = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 8}
IMAGES_AND_TEXT = {"text_config": {**TEXT, "max_position_embeddings": 16}, "vision_config": VISION}


@pytest.mark.parametrize(
    "architecture",
    [
        "BertForPreTraining",
        *(pytest.param(a, marks=pytest.mark.slow) for a in ("BertForQuestionAnswering", "DPRContextEncoder")),
    ],
)
def test_models_that_return_neither_logits_nor_hidden_states_are_converted(
    architecture: str, chosen, tmp_path
) -> None:
    """They ended in a ValueError."""
    config = "DPRConfig" if architecture.startswith("DPR") else "BertConfig"
    folder = saved(tmp_path / "m", architecture, config, {**TEXT, "max_position_embeddings": 64})
    ids = torch.randint(3, 100, (8, 16), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, tmp_path / "a.safetensors")
    result = convert(chosen(folder, datasets=(str(tmp_path / "a.safetensors"),)))
    assert result.report["accuracy"]["final"]["mean_cosine"] > 0.99


def texts_and_images() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(3, 100, (8, 8), generator=generator),
        "pixel_values": torch.randn(8, 3, 16, 16, generator=generator),
    }


@pytest.mark.parametrize("architecture", ["CLIP", pytest.param("Siglip", marks=pytest.mark.slow)])
def test_a_model_of_text_and_images_asks_for_both(architecture: str, chosen, tmp_path) -> None:
    """It ended in an AttributeError of transformers, for what was made up is a text alone."""
    folder = saved(tmp_path / "m", f"{architecture}Model", f"{architecture}Config", IMAGES_AND_TEXT)
    model = StreamedModel.from_checkpoint(open_checkpoint(folder))
    with pytest.raises(UsageError, match=r"Model does not run on input_ids alone \(.+\): give real inputs"):
        one_input(model, {"input_ids": torch.ones(1, 8, dtype=torch.int64)})
    save_file(texts_and_images(), tmp_path / "a.safetensors")
    # Balanced: its temperature is a number without axes, which a measured mix decodes.
    options = chosen(folder, datasets=(str(tmp_path / "a.safetensors"),), effort="balanced")
    assert convert(options).report["accuracy"]["final"]["mean_cosine"] > 0.99


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("VideoMAE", {"image_size": 16, "patch_size": 8, "num_frames": 2}),
        ("AST", {"num_mel_bins": 16, "max_length": 32, "patch_size": 8}),
    ],
)
def test_films_and_spectrograms_by_time_are_made_up(
    kind: str, settings: dict[str, int], chosen, tmp_path
) -> None:
    """Models of films were given images, and AST nothing."""
    sizes = {key: size for key, size in TEXT.items() if key != "vocab_size"}
    task = "ForVideoClassification" if kind == "VideoMAE" else "ForAudioClassification"
    folder = saved(tmp_path / "m", f"{kind}{task}", f"{kind}Config", {**sizes, **settings})
    assert convert(chosen(folder)).report["accuracy"]["final"]["mean_cosine"] > 0.99


def test_a_model_that_reads_no_text_without_an_image_asks_for_both(chosen, tmp_path) -> None:
    """It was taken for a language model, and its config blamed."""
    vision = {**TEXT, "image_size": 16, "patch_size": 8}
    settings = {
        "vision_config": vision,
        "qformer_config": {**TEXT, "encoder_hidden_size": 64},
        "text_config": {**OPT, "model_type": "opt"},
        "num_query_tokens": 2,
        "image_token_index": 99,
    }
    folder = saved(tmp_path / "m", "Blip2ForConditionalGeneration", "Blip2Config", settings)
    with pytest.raises(UsageError, match=r"does not run on pixel_values alone .+ give real inputs"):
        convert(chosen(folder))
    tokens = torch.cat([torch.full((8, 2), 99), torch.randint(0, 99, (8, 6))], 1)
    save_file(
        {"pixel_values": torch.randn(8, 3, 16, 16), "input_ids": tokens}, tmp_path / "inputs.safetensors"
    )
    result = convert(chosen(folder, datasets=(str(tmp_path / "inputs.safetensors"),)))
    assert result.report["accuracy"]["final"]["mean_cosine"] > 0.99


def test_a_model_may_write_into_what_its_embedding_gives_and_keep_a_cache(chosen, tmp_path) -> None:
    """BLIP's text model adds its positions in place, and filled its cache anew where a layer was computed again."""
    text = {**TEXT, "max_position_embeddings": 16, "encoder_hidden_size": 64}
    config = {**IMAGES_AND_TEXT, "text_config": text}
    folder = saved(tmp_path / "m", "BlipForConditionalGeneration", "BlipConfig", config)
    save_file(texts_and_images(), tmp_path / "a.safetensors")
    result = convert(chosen(folder, datasets=(str(tmp_path / "a.safetensors"),)))
    assert result.report["accuracy"]["final"]["mean_cosine"] > 0.99


@pytest.mark.parametrize(
    "architecture, config", [("RobertaModel", "RobertaConfig"), ("EsmModel", "EsmConfig")]
)
def test_positions_that_begin_behind_the_one_of_padding_are_fewer(
    architecture: str, config: str, tmp_path
) -> None:
    """Windows of 128 tokens ended in an IndexError."""
    settings = {
        **TEXT,
        "max_position_embeddings": 128,
        "pad_token_id": 1,
        "position_embedding_type": "absolute",
    }
    folder = saved(tmp_path / "m", architecture, config, settings)
    model = StreamedModel.from_checkpoint(open_checkpoint(folder))
    longest = longest_window(model)
    assert longest == 126
    assert model.outputs(input_ids=torch.full((1, longest), 7)).shape[1] == longest

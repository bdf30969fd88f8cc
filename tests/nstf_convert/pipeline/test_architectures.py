"""Models whose embeddings, layers or inputs are unlike Llama's are calibrated and converted all the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from nstf.runtime import load
from nstf_convert.pipeline import calibrate, convert
from nstf_convert.pipeline.calibrate import gradients, make
from nstf_convert.pipeline.calibrate.checked import check_given
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


@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert", "WavLM"])
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

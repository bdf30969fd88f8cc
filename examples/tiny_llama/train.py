"""Trains the sample LLaMA: vocabulary 1000, hidden 256, 4 layers, 8 heads, FFN 512, 2.88 M parameters.

    python examples/tiny_llama/train.py                                     # a GPU: about two minutes
    python examples/tiny_llama/train.py --steps 500 --batch 8 --device cpu  # two cores: about ten minutes

The weights in `model/` came from the first command.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from language_model import VOCABULARY, Settings, run  # noqa: E402


def build() -> LlamaForCausalLM:
    """The untrained model."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
            intermediate_size=512,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def main() -> None:
    settings = Settings.from_arguments("Train the sample LLaMA.", HERE / "model", steps=2000, dropout=0.3)
    torch.manual_seed(settings.seed)
    run(build(), settings)


if __name__ == "__main__":
    main()

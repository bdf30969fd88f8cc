"""Trains the sample mixture of experts: a small Qwen3-MoE, 3 layers, top 2 of 8 experts, 1.75 M parameters.

    python examples/tiny_moe/train.py                                      # a GPU: about two minutes
    python examples/tiny_moe/train.py --steps 500 --batch 8 --device cpu  # two cores: about fifteen minutes

Tokenizer and text are those of the sample LLaMA. The weights in `model/` came from the first command.
"""

import sys
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from language_model import VOCABULARY, Settings, run  # noqa: E402


def build() -> Qwen3MoeForCausalLM:
    """The untrained model. 1.5 of its 1.8 M parameters are experts."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            moe_intermediate_size=160,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            output_router_logits=True,
            router_aux_loss_coef=0.01,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def main() -> None:
    settings = Settings.from_arguments(
        "Train the sample mixture of experts.", HERE / "model", steps=1800, dropout=0.2
    )
    torch.manual_seed(settings.seed)
    run(build(), settings)


if __name__ == "__main__":
    main()

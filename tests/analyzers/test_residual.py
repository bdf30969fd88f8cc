"""Layers that write to the residual stream are told from those that do not."""

import torch
from torch import nn

from nstf.analyzers.residual import residual_writers


class Block(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(8), scale
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


def found(*blocks: Block) -> dict[str, str]:
    torch.manual_seed(0)
    model = nn.Sequential(*blocks, nn.LayerNorm(8))
    layers = {p: m for p, m in model.named_modules() if isinstance(m, nn.Linear)}
    return residual_writers(model, layers, lambda: model(torch.randn(1, 4, 8)))


def test_last_layer_of_every_block_is_found_with_its_norm() -> None:
    assert found(Block(), Block()) == {"0.down": "0.norm", "1.down": "1.norm"}


def test_scaled_output_is_not_a_plain_write_to_the_stream() -> None:
    assert found(Block(0.5), Block()) == {"1.down": "1.norm"}

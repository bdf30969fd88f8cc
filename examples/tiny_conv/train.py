"""Trains the sample convolutional model: a small ResNet, 3x3 kernels, 64 to 128 channels, 0.74 M parameters.

    python examples/tiny_conv/train.py                                        # a GPU: about two minutes
    python examples/tiny_conv/train.py --steps 600 --batch 64 --device cpu    # two cores: about ten minutes

The pictures are drawn while it trains (`shapes.py`), each is seen once. The weights in `model/` came from the
first command.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import ResNetConfig, ResNetForImageClassification

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from shapes import CLASSES, pictures  # noqa: E402

HELDOUT_SEED = 10**9
HELDOUT_COUNT = 4096


def build() -> ResNetForImageClassification:
    """The untrained model."""
    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=64,
            hidden_sizes=[64, 96, 128],
            depths=[2, 2, 1],
            layer_type="basic",
            downsample_in_first_stage=False,
            num_labels=len(CLASSES),
            id2label=dict(enumerate(CLASSES)),
            label2id={name: i for i, name in enumerate(CLASSES)},
        )
    )


@torch.no_grad()
def accuracy(model: torch.nn.Module, device: str = "cpu", count: int = HELDOUT_COUNT) -> float:
    """Share of right answers on `count` held-out pictures (a seed that training never uses)."""
    right = 0
    for start in range(0, count, 256):
        x, y = pictures(min(256, count - start), HELDOUT_SEED + start)
        right += int((model(pixel_values=x.to(device)).logits.argmax(-1).cpu() == y).sum())
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the sample convolutional model.")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "model")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = build().to(args.device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, total_steps=args.steps, pct_start=0.1
    )
    started = time.monotonic()
    for step in range(args.steps):
        model.train()
        x, y = pictures(args.batch, args.seed * 10**7 + step, args.device)
        loss = torch.nn.functional.cross_entropy(model(pixel_values=x).logits, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, args.steps // 10) == 0:
            share = accuracy(model.eval(), args.device, 1024)
            print(f"step {step + 1}: accuracy {share:.4f}, {time.monotonic() - started:.0f} s", flush=True)
    model.to("cpu").to(torch.bfloat16).save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    print(f"held-out accuracy with the stored bfloat16 weights: {accuracy(model.float().eval()):.4f}")


if __name__ == "__main__":
    main()

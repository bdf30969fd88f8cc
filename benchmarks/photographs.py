"""Pictures and network of `convolution.py`: scikit-learn's digits on its photographs, and a ResNet-18 that reads them."""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 48
TEST_SEED, CALIBRATION_SEED = 10**9, 5 * 10**8
TESTED = 1024
SHARD_BYTES = 15 << 20


class Pictures:
    """Digits on photographs: `draw(count, seed)` gives the same pictures each time."""

    def __init__(self, test: bool) -> None:
        from sklearn.datasets import load_digits, load_sample_image

        digits = load_digits()
        kept = torch.arange(len(digits.target)) % 5 == 0
        kept = kept if test else ~kept
        self.digits = torch.tensor(digits.images, dtype=torch.float32)[kept] / 16
        self.labels = torch.tensor(digits.target)[kept]
        photographs = [
            torch.tensor(load_sample_image(n)).permute(2, 0, 1) / 255 for n in ("china.jpg", "flower.jpg")
        ]
        cut = photographs[0].shape[2] * 3 // 4
        self.photographs = [p[:, :, cut:] if test else p[:, :, :cut] for p in photographs]

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """(pictures [count, 3, SIZE, SIZE] about 0, labels [count])."""
        g = torch.Generator().manual_seed(seed)

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return torch.rand(count, *shape, generator=g) * (high - low) + low

        which = torch.randint(len(self.digits), (count,), generator=g)
        angle, size = uniform(-0.35, 0.35), uniform(1.0, 1.7)
        cosine, sine = torch.cos(angle) * size, torch.sin(angle) * size
        moved = uniform(-1, 1, 2) * (size - 1.0)[:, None]
        affine = torch.stack([cosine, -sine, moved[:, 0], sine, cosine, moved[:, 1]], 1).view(-1, 2, 3)
        grid = F.affine_grid(affine, [count, 1, SIZE, SIZE], align_corners=False)
        mask = F.grid_sample(self.digits[which][:, None], grid, align_corners=False)
        behind = torch.empty(count, 3, SIZE, SIZE)
        for i in range(count):
            photograph = self.photographs[int(torch.randint(2, (), generator=g))]
            top, left = (int(torch.randint(n - SIZE, (), generator=g)) for n in photograph.shape[1:])
            behind[i] = photograph[:, top : top + SIZE, left : left + SIZE]
        ink = uniform(0, 1, 3, 1, 1)
        # Far enough from what is behind it to be read.
        far = (ink.mean((1, 2, 3)) - behind.mean((1, 2, 3))).abs() < 0.35
        ink[far] = torch.where(behind[far].mean((1, 2, 3), keepdim=True) > 0.5, 0.1, 0.9) + 0 * ink[far]
        strength = mask * uniform(0.7, 1.0, 1, 1, 1)
        picture = behind * (1 - strength) + ink * strength + 0.03 * torch.randn(behind.shape, generator=g)
        return (picture - 0.5) / 0.25, self.labels[which]


def build() -> nn.Module:
    """ResNet-18 for ten classes, untrained: 11.2 M parameters."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=10,
    )
    return ResNetForImageClassification(config)


class _Batches(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """The pictures of so many steps, drawn by some processes: picture for picture the same for any number of them."""

    def __init__(self, pictures: Pictures, steps: int, batch: int) -> None:
        self.pictures, self.steps, self.batch = pictures, steps, batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for step in range(first, self.steps, every):
            yield self.pictures.draw(self.batch, step)


def train(
    out: Path,
    steps: int,
    batch: int,
    rate: float,
    device: str = "cpu",
    workers: int = 0,
    seconds: float = math.inf,
    build: Callable[[], nn.Module] = build,
) -> None:
    """Trains and writes the model that `build` makes. workers: processes that draw pictures beside this one. seconds: ends
    by then if the steps take longer; the rate falls with whichever is nearer to its end."""
    torch.manual_seed(0)
    model = build().to(device, memory_format=torch.channels_last)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    drawn = torch.utils.data.DataLoader(
        _Batches(Pictures(test=False), steps, batch), batch_size=None, num_workers=workers
    )
    began = time.monotonic()
    for step, (x, y) in enumerate(drawn):
        part = max(step / steps, (time.monotonic() - began) / seconds)
        if part >= 1:
            print(f"no time left after {step} steps", flush=True)
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * part)) / 2
        model.train()
        x, y = x.to(device, memory_format=torch.channels_last), y.to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(pixel_values=x).logits
        loss = F.cross_entropy(logits.float(), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if (step + 1) % max(1, steps // 20) == 0:
            print(
                f"step {step + 1}: loss {loss.item():.3f}, {time.process_time():.0f} s of processor time, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
    model.eval().to("cpu", memory_format=torch.contiguous_format)
    save(model, out)
    print(f"right on test pictures: {accuracy(logits_of(model)):.4f}")


def save(model: Any, out: Path) -> None:
    """Writes the model, its convolutions rounded to bfloat16 (also in `model`), in files of at most SHARD_BYTES."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    for name, value in model.state_dict().items():
        if value.ndim == 4:
            stored = value.to(torch.bfloat16)
            value.copy_(stored)
        else:
            stored = value.clone()
        if sum(v.nbytes for v in shards[-1].values()) + stored.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = stored.contiguous()
    out.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, out / name, metadata={"format": "pt"})
    index = {"weight_map": {n: file for file, shard in zip(names, shards, strict=True) for n in shard}}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, **index}, indent=1) + "\n")
    (out / "config.json").write_text(
        json.dumps({**model.config.to_dict(), "dtype": "float32", "architectures": [type(model).__name__]})
    )


@torch.inference_mode()
def logits_of(model: Any, count: int | None = None) -> Tensor:
    """Logits of the first test pictures [count, 10]; None: of TESTED."""
    pictures, count = Pictures(test=True), count or TESTED
    parts = [pictures.draw(64, TEST_SEED + start)[0] for start in range(0, count, 64)]
    return torch.cat([model(pixel_values=x).logits.float() for x in parts])


def labels(count: int) -> Tensor:
    pictures = Pictures(test=True)
    return torch.cat([pictures.draw(64, TEST_SEED + start)[1] for start in range(0, count, 64)])


def accuracy(logits: Tensor) -> float:
    return float((logits.argmax(-1) == labels(len(logits))).float().mean())


def divergence(logits: Tensor, reference: Tensor) -> float:
    """Mean KL divergence in nats."""
    p = F.log_softmax(reference.double(), -1)
    return float((p.exp() * (p - F.log_softmax(logits.double(), -1))).sum(-1).mean())

"""How often the rows of embedding tables are looked up."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nstf.analyzers.by_thread import ByThread
from nstf_convert.pipeline.calibrate.text import Batch, Data

# Share of the look-ups that is spread evenly over all rows, so that rows the text does not use still count.
FREQUENCY_SMOOTHING = 0.2


def of_all(counts: Tensor, data: Data) -> Tensor:
    """How often each row is looked up by all batches, where the batches that were read looked up their `input_ids`."""

    def looked_up(some: Sequence[Batch]) -> Tensor | None:
        ids = [b["input_ids"].reshape(-1) for b in some if "input_ids" in b]
        if len(ids) < len(some) or max(int(i.max()) for i in ids) >= counts.numel():
            return None
        return torch.bincount(torch.cat(ids), minlength=counts.numel()).double()

    every, part = looked_up(data.fit), looked_up(data.to_read)
    return counts if every is None or part is None or not torch.equal(part, counts.cpu()) else every


def frequency(counts: Tensor) -> Tensor:
    """The share of the look-ups that each row has, smoothed: [rows] float32."""
    share = counts / counts.sum().clamp_min(1)
    smooth = FREQUENCY_SMOOTHING / share.numel()
    return ((1 - FREQUENCY_SMOOTHING) * share + smooth).to(torch.float32)


def counter(name: str, rows: int, every: ByThread[dict[str, Tensor]]) -> Any:
    """A forward hook that counts the look-ups of a table of so many rows under its name, for the thread that runs."""

    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        ids = args[0] if args else None
        # Position tables of OPT take a mask, those of Whisper the tokens: what they look up is not in the arguments.
        if not isinstance(ids, Tensor) or ids.is_floating_point() or out.shape != (*ids.shape, out.shape[-1]):
            return
        if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= rows or _finds_rows_itself(module):
            return
        found = torch.bincount(ids.reshape(-1), minlength=rows).double().cpu()
        counts = every.value
        counts[name] = counts.get(name, torch.zeros(rows, dtype=torch.float64)) + found

    return hook


def _finds_rows_itself(module: nn.Module) -> bool:
    """Whether an embedding computes the rows it looks up from something else, as learned positions do."""
    return type(module) is not nn.Embedding and "Position" in type(module).__name__

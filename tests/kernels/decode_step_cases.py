"""The kernels between a decoder's matrices against their torch definition; as a program, their errors as JSON.

Interpreted kernels run in a process of their own: Triton reads TRITON_INTERPRET when it is imported.
"""

import json
import sys
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nstf.kernels.torch import decode_step as reference
from nstf.kernels.torch.decode_step import Cache, Heads


class Attention(NamedTuple):
    """Tokens so far at several calls, the shape of the heads, and what is done to q and k."""

    positions: tuple[int, ...]
    capacity: int
    heads: int
    kv_heads: int
    size: int
    window: int = 0
    norm: bool = False
    bias: bool = False
    batch: int = 1
    dtype: str = "float32"
    slots: tuple[int, ...] = ()  # the sequence of each token; token i is 7 i positions behind


ATTENTION = {
    "first tokens": Attention((0, 1, 2), 16, 4, 2, 16),
    "one tile": Attention((30, 31), 64, 4, 4, 32, batch=2),
    "several programs": Attention((63, 64, 65, 200, 255), 256, 8, 2, 16, batch=3),
    "more tiles than programs": Attention((4100,), 5000, 2, 1, 16),
    "a window": Attention((3, 70, 150, 201), 256, 4, 2, 16, window=66),
    "norms and biases": Attention((5, 90), 128, 4, 2, 24, norm=True, bias=True),
    "bfloat16": Attention((0, 100), 128, 4, 1, 32, dtype="bfloat16"),
    "float16": Attention((100,), 128, 4, 1, 32, dtype="float16", batch=2),
    "positions of their own": Attention((90, 91), 128, 4, 2, 16, batch=3, slots=(4, 0, 3)),
    "positions of their own in a window": Attention(
        (90,), 128, 4, 2, 16, 20, True, True, batch=2, slots=(1, 0)
    ),
}
# Prompts, or pieces of such: (position of the first token, of the one behind the last) in `positions`.
PROMPTS = {
    "prompts": Attention((0, 5), 8, 8, 2, 16, batch=2),
    "prompts with norms and biases": Attention((2, 5), 7, 6, 2, 24, norm=True, bias=True, batch=2),
    "prompts with more heads than a program's": Attention((0, 2), 4, 70, 35, 32, bias=True),
    "prompts in bfloat16": Attention((5, 14), 16, 4, 1, 32, dtype="bfloat16"),
}
# Rounding of the result, and of the products of queries and keys, in each dtype: of the largest value.
LIMITS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}


def attention_error(case: Attention, device: str) -> float:
    """The largest error of outputs and caches, relative to the largest value."""
    from nstf.kernels.triton import decode_step
    from nstf.kernels.triton.linear import arch_of

    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shape = Heads(case.heads, case.kv_heads, case.size, case.size**-0.5, case.window)
    angles = torch.outer(torch.arange(case.capacity).float(), 0.5 ** torch.arange(case.size // 2).float())
    kept = (max((case.batch - 1, *case.slots)) + 1, case.kv_heads, case.capacity, case.size)
    keys, values = random(*kept).to(dtype), random(*kept).to(dtype)
    keys[:, :, max(case.positions) :] = float("nan")  # not written yet
    values[:, :, max(case.positions) :] = float("nan")
    cache = Cache(keys, values, angles.cos(), angles.sin())
    there = Cache(*(t.clone().to(device) for t in (keys, values, angles.cos(), angles.sin())))
    bias = random(shape.width) if case.bias else None
    gains = (random(case.size), random(case.size)) if case.norm else None
    room = decode_step.scratch(case.batch, shape, torch.device(device))
    worst = 0.0
    for at in case.positions:
        qkv = random(case.batch, shape.width).to(dtype)
        position = torch.tensor([at])
        if case.slots:
            position = torch.tensor([(at - 7 * i, slot) for i, slot in enumerate(case.slots)])
        wanted = reference.attend(qkv, bias, gains, cache, position, shape)
        found = decode_step.attend(
            qkv.to(device), None if bias is None else bias.to(device),
            None if gains is None else (gains[0].to(device), gains[1].to(device)),
            there, position.to(device), shape, room, arch_of(torch.device(device)),
        )  # fmt: skip
        written = [
            (t[:, :, : at + 1].nan_to_num(0.0)) for t in (there.keys, cache.keys, there.values, cache.values)
        ]
        for mine, theirs in ((found, wanted), (written[0], written[1]), (written[2], written[3])):
            error = (mine.cpu().float() - theirs.float()).abs().max() / theirs.float().abs().max()
            worst = max(worst, float(error) if not error.isnan() else float("inf"))
    if int(room.counters.abs().max()):
        return float("inf")
    return worst


def prompt_error(case: Attention, device: str) -> float:
    """The largest error of queries and caches, relative to the largest value; inf where other places were written to."""
    from nstf.kernels.triton.linear import arch_of
    from nstf.kernels.triton.prompt_heads import place

    generator = torch.Generator().manual_seed(0)
    dtype, (first, end) = getattr(torch, case.dtype), case.positions
    tokens = end - first

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shape = Heads(case.heads, case.kv_heads, case.size, case.size**-0.5)
    angles = torch.outer(torch.arange(case.capacity).float(), 0.5 ** torch.arange(case.size // 2).float())
    room = torch.full((case.batch, case.kv_heads, case.capacity, case.size), float("nan"), dtype=dtype)
    cache = Cache(room.clone(), room.clone(), angles.cos(), angles.sin())
    there = Cache(*(t.to(device) for t in (room.clone(), room.clone(), angles.cos(), angles.sin())))
    bias = random(shape.width) if case.bias else None
    gains = (random(case.size), random(case.size)) if case.norm else None
    qkv = random(case.batch * tokens, shape.width).to(dtype)
    wanted = reference.place(qkv, bias, gains, cache, tokens, shape, first)
    found = place(
        qkv.to(device), None if bias is None else bias.to(device),
        None if gains is None else (gains[0].to(device), gains[1].to(device)),
        there, tokens, shape, first, arch_of(torch.device(device)),
    )  # fmt: skip
    for kept in (there.keys, there.values):
        if not bool(kept[:, :, :first].isnan().all() and kept[:, :, end:].isnan().all()):
            return float("inf")
    pairs = ((found, wanted), (there.keys, cache.keys), (there.values, cache.values))
    errors = [
        _relative(mine[..., first:end, :].float(), theirs[..., first:end, :].float())
        if mine.dim() == 4
        else _relative(mine.float(), theirs.float())
        for mine, theirs in pairs
    ]
    return float("inf") if any(e != e for e in errors) else max(errors)


def others(device: str) -> dict[str, float]:
    """Errors of norms and gates, each relative to the largest value."""
    from nstf.kernels.triton import decode_step
    from nstf.kernels.triton.linear import arch_of

    arch = arch_of(torch.device(device))
    generator = torch.Generator().manual_seed(1)
    found = {}
    for size in (40, 1024, 4096):
        h, y = torch.randn(2, size, generator=generator), torch.randn(2, size, generator=generator)
        gain, out_gain = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
        for more, last in ((None, None), (y, None), (y, out_gain)):
            mine = h.clone().to(device)
            theirs = h.clone()
            wanted = reference.add_norm(theirs, more, gain, 1e-6, torch.float32, last)
            x = decode_step.add_norm(
                mine, None if more is None else more.to(device), gain.to(device), 1e-6, torch.float32, arch,
                None if last is None else last.to(device),
            )  # fmt: skip
            name = f"norm {size}{' add' if more is not None else ''}{' out' if last is not None else ''}"
            found[name] = max(_relative(x, wanted), _relative(mine, theirs))
    for gelu, rows in ((False, 3), (True, 3), (False, 20)):
        x = 3 * torch.randn(rows, 2 * 700, generator=generator)
        found[f"gate gelu={gelu}, {rows}"] = _relative(
            decode_step.gate(x.to(device), gelu, arch), reference.gate(x, gelu)
        )
    return found


def wrong_choices(vocab: int, dtype: torch.dtype, device: str) -> float:
    """The share of sequences whose likeliest token is another than torch's; inf for a wrong position or counter."""
    from nstf.kernels.triton import likeliest
    from nstf.kernels.triton.linear import arch_of

    where = torch.device(device)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator).to(dtype)
    logits[1] = float("-inf")
    logits[2] = 0.25
    logits[3, [vocab // 3, vocab - 1]] = 1000.0
    logits[4, vocab // 2] = float("nan")
    logits[5, -1] = 1000.0
    wanted = logits.argmax(dim=-1)
    room = likeliest.scratch(len(logits), vocab, where)
    tokens = torch.full((len(logits),), -1, device=where)
    position = torch.tensor([7], device=where)
    for _ in range(2):
        likeliest.advance(logits.to(where), tokens, position, room, arch_of(where))
    if position.item() != 9 or int(room.counters.abs().max()):
        return float("inf")
    return float((tokens.cpu() != wanted).float().mean())


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu() - wanted).abs().max() / wanted.abs().max())


def errors(device: str) -> dict[str, float]:
    attention = {name: attention_error(case, device) for name, case in ATTENTION.items()}
    chosen = {
        f"likeliest of {vocab}, {dtype}": wrong_choices(vocab, dtype, device)
        for vocab, dtype in ((112, torch.float32), (5000, torch.float16), (49152, torch.bfloat16))
    }
    prompts = {name: prompt_error(case, device) for name, case in PROMPTS.items()}
    return attention | prompts | others(device) | chosen


def limit(name: str) -> float:
    cases = ATTENTION | PROMPTS
    return LIMITS[cases[name].dtype] if name in cases else 1e-5


def main() -> None:
    import quick_interpreter

    quick_interpreter.install()
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    found: dict[str, Any] = errors("cpu")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

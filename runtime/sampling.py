"""The choice of the next token on its device: greedy, or drawn as transformers draws it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn, as transformers does: temperature, then the top k (0: all), then the top p."""

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0


def choose(logits: Tensor, sampling: Sampling | None) -> Tensor:
    """The next token of each sequence, int64 [batch], from logits [batch, vocab]; the likeliest when sampling is None.

    No round trip to the host, so it can be part of a captured graph.
    """
    if sampling is None:
        return _likeliest(logits)
    scores = logits.float() / sampling.temperature
    top_k = min(sampling.top_k, scores.shape[-1])
    if top_k or sampling.top_p < 1.0:
        best = (scores.topk(top_k) if top_k else scores.sort(dim=-1, descending=True)).values
        least = best[:, -1:]
        if sampling.top_p < 1.0:
            # A token stays while those before it have less than p together.
            share = best.softmax(dim=-1)
            kept = (share.cumsum(dim=-1) - share < sampling.top_p).sum(dim=-1, keepdim=True)
            least = best.gather(-1, (kept - 1).clamp_min(0))
        scores = scores.masked_fill(scores < least, float("-inf"))
    share = scores.softmax(dim=-1)
    # What torch.multinomial does for one draw, without its look at the numbers from the host.
    return _likeliest(share / torch.empty_like(share).exponential_(1.0))


def _likeliest(logits: Tensor) -> Tensor:
    """argmax over the last axis, in two stages: a GPU's reduction of a single row keeps one multiprocessor busy."""
    batch, vocab = logits.shape
    parts = _parts(vocab)
    best, at = logits.view(batch, parts, -1).max(dim=-1)
    part = best.argmax(dim=-1, keepdim=True)
    return (at.gather(-1, part) + part * (vocab // parts)).squeeze(-1)


def _parts(vocab: int) -> int:
    """Equal parts of a row that multiprocessors can share."""
    return math.gcd(vocab, 256)

"""How far one model's predictions are from another's: per-token scores and their summary.

The protocol is llama-perplexity's: the text is cut into windows of `seq_len` tokens that do not overlap, and
of each window the last `seq_len / 2 - 1` predictions are scored (255 of 512), so that every scored token has
a long context. KL divergence is KL(reference || test), in nats; perplexity is exp of the mean negative
log-likelihood.

Standard errors are those of the mean over windows (the tokens of one window are correlated, windows much less
so). They are None for a single window.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

MAX_ROWS = 256
# A float32 block of this many elements takes 16 MiB; about five are alive at a time.
MAX_ELEMENTS = 1 << 22
# Rows that go through the heads together, at least: with fewer reading their weights takes longer than multiplying them.
LEAST_ROWS = 64


class LanguageModel(Protocol):
    """What is measured: hidden states for a batch of windows, then logits for some rows of them."""

    def hidden(self, ids: Tensor) -> Tensor:
        """ids: [b, t] int64 -> [b, t, d]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, d] -> [n, V]."""
        ...


@dataclass(frozen=True)
class TokenScores:
    """Per scored position. kl: [n] nats; top1: [n] bool (same most likely token); nll_*: [n] nats."""

    kl: Tensor
    top1: Tensor
    nll_ref: Tensor
    nll_test: Tensor


@dataclass(frozen=True)
class Accuracy:
    """What a changed model lost against its reference on held-out text. Lower KLD is better; KLD in nats."""

    mean_kl: float
    mean_kl_se: float | None
    median_kl: float
    p99_kl: float
    max_kl: float
    top1: float
    top1_se: float | None
    ppl_reference: float
    ppl_reference_se: float | None
    ppl: float
    ppl_se: float | None
    ppl_ratio: float
    ppl_ratio_se: float | None
    windows: int
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; a number that is not finite becomes null (JSON has no NaN)."""
        return _finite(asdict(self))


@dataclass(frozen=True)
class Similarity:
    """What a changed encoder lost: cosine of its outputs with the reference's, and the relative L2 error."""

    mean_cosine: float
    min_cosine: float
    relative_l2: float
    outputs: int

    def to_json(self) -> dict[str, Any]:
        return _finite(asdict(self))


def first_scored(seq_len: int) -> int:
    """The first scored row of a window: rows first..seq_len-2 predict tokens first+1..seq_len-1."""
    return seq_len // 2


def cut_windows(ids: Sequence[int] | Tensor, seq_len: int, count: int | None = None) -> Tensor:
    """Windows that do not overlap, [count, seq_len] int64; the incomplete last one is dropped.

    Raises ValueError when there is not one whole window or `seq_len` leaves nothing to score.
    """
    if seq_len < 4:
        raise ValueError(f"windows of {seq_len} tokens are too short to score; use at least 4")
    flat = torch.as_tensor(ids, dtype=torch.int64).reshape(-1)
    available = flat.numel() // seq_len
    if available < 1:
        raise ValueError(f"the text has {flat.numel()} tokens, less than one window of {seq_len}")
    used = available if count is None else min(count, available)
    return flat[: used * seq_len].reshape(used, seq_len)


def compare(ref_logits: Tensor, test_logits: Tensor, labels: Tensor) -> TokenScores:
    """Scores of every row. ref_logits, test_logits: [n, V]; labels: [n] int64, the tokens that follow.

    Computed by blocks of at most MAX_ROWS rows. A row with a NaN in either logits scores a NaN KLD, which no
    gate lets pass.
    """
    if ref_logits.shape != test_logits.shape or ref_logits.ndim != 2 or labels.shape != ref_logits.shape[:1]:
        raise ValueError(
            f"reference logits {list(ref_logits.shape)}, test logits {list(test_logits.shape)} and labels "
            f"{list(labels.shape)} do not belong together"
        )
    blocks = [
        _compare_block(ref_logits[rows], test_logits[rows], labels[rows])
        for rows in _blocks(ref_logits.shape[0], ref_logits.shape[1])
    ]
    return _join(blocks)


def score_window(
    reference: LanguageModel, ref_hidden: Tensor, test: LanguageModel, test_hidden: Tensor, ids: Tensor
) -> TokenScores:
    """Scores of one window. ref_hidden, test_hidden: [t, d]; ids: [t]. Logits exist for a block at a time."""
    first = first_scored(ids.shape[0])
    rows_ref, rows_test, labels = ref_hidden[first:-1], test_hidden[first:-1], ids[first + 1 :]
    blocks = []
    start, step = 0, LEAST_ROWS
    while start < labels.shape[0]:
        rows = slice(start, start + step)
        wanted = reference.logits(rows_ref[rows])
        blocks.append(compare(wanted, test.logits(rows_test[rows]), labels[rows]))
        start, step = start + step, min(MAX_ROWS, max(LEAST_ROWS, MAX_ELEMENTS // wanted.shape[1]))
    return _join(blocks)


def summarise(windows: Sequence[TokenScores]) -> Accuracy:
    """The accuracy over all windows; every token counts the same. Raises ValueError when there is none."""
    if not windows or any(w.kl.numel() == 0 for w in windows):
        raise ValueError("no scored tokens")
    all_tokens = _join(windows)
    kl = all_tokens.kl
    mean_kl, kl_se = _mean_se([w.kl for w in windows])
    top1, top1_se = _mean_se([w.top1 for w in windows])
    if bool(all_tokens.nll_test.isnan().any()):
        top1 = top1_se = math.nan  # the largest of NaN is no token
    nll_ref, nll_ref_se = _mean_se([w.nll_ref for w in windows])
    nll, nll_se = _mean_se([w.nll_test for w in windows])
    shift, shift_se = _mean_se([w.nll_test - w.nll_ref for w in windows])
    return Accuracy(
        mean_kl=mean_kl,
        mean_kl_se=kl_se,
        median_kl=_quantile(kl, 0.5),
        p99_kl=_quantile(kl, 0.99),
        max_kl=_quantile(kl, 1.0),
        top1=top1,
        top1_se=top1_se,
        ppl_reference=_exp(nll_ref),
        ppl_reference_se=_scaled(nll_ref_se, _exp(nll_ref)),
        ppl=_exp(nll),
        ppl_se=_scaled(nll_se, _exp(nll)),
        # Paired: the text's own difficulty cancels, so this error is far smaller than the other two.
        ppl_ratio=_exp(shift),
        ppl_ratio_se=_scaled(shift_se, _exp(shift)),
        windows=len(windows),
        tokens=kl.numel(),
    )


def compare_outputs(reference: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """(cosine [n], relative L2 error [n]) of two encoders' outputs, [n, d] or [n, ...] flattened."""
    if reference.shape != test.shape:
        raise ValueError(f"outputs {list(reference.shape)} and {list(test.shape)} differ in shape")
    ref, out = reference.flatten(1).double(), test.flatten(1).double()
    norm = ref.norm(dim=1).clamp_min(1e-300)
    cosine = (ref * out).sum(1) / (norm * out.norm(dim=1).clamp_min(1e-300))
    return cosine.clamp(-1.0, 1.0), (out - ref).norm(dim=1) / norm


def summarise_outputs(cosine: Tensor, relative_l2: Tensor) -> Similarity:
    """Mean and minimum cosine, mean relative L2 error. Raises ValueError when there is no output."""
    if cosine.numel() == 0:
        raise ValueError("no outputs to compare")
    minimum = math.nan if bool(cosine.isnan().any()) else float(cosine.min())
    return Similarity(float(cosine.mean()), minimum, float(relative_l2.mean()), cosine.numel())


def _compare_block(ref_logits: Tensor, test_logits: Tensor, labels: Tensor) -> TokenScores:
    """Scores of one block, in float32 where that is exact enough and float64 where it is not.

    With d = test - ref, p = softmax(ref), m = E_p[d] and e = d - m: KL = log E_p[exp(e)], and as E_p[e] = 0,
    KL = log1p(E_p[expm1(e) - e]). Every term is >= 0, so nothing cancels: divergences of 1e-9 nats keep four
    digits in float32, at a third of the time of two float64 log-softmaxes.
    """
    ref, test = ref_logits.float(), test_logits.float()
    labels = labels.to(ref.device)  # windows of text stay on the CPU
    p = torch.softmax(ref, dim=-1)
    shift = test - ref
    shift -= (p * shift).sum(-1, keepdim=True)
    gain = torch.expm1(shift)
    gain -= shift
    gain *= p
    kl = torch.log1p(gain.sum(-1, dtype=torch.float64))
    # Excluded tokens (-inf), exp beyond float32, large differences: the plain formula, in float64.
    hard = ~(kl < 0.5)
    if bool(hard.any()):
        kl[hard] = _divergence(ref[hard].double(), test[hard].double())
    nll_ref, nll_test = (
        (x.logsumexp(-1) - x.gather(1, labels[:, None]).squeeze(1)).double() for x in (ref, test)
    )
    return TokenScores(kl, ref.argmax(-1) == test.argmax(-1), nll_ref, nll_test)


def _divergence(ref: Tensor, test: Tensor) -> Tensor:
    """KL(ref || test) of logits [n, V], by definition."""
    log_p, log_q = torch.log_softmax(ref, dim=-1), torch.log_softmax(test, dim=-1)
    p = log_p.exp()
    # 0 * log 0 = 0: a token the reference excludes costs nothing.
    terms = torch.where(p == 0, p.new_zeros(()), p * (log_p - log_q))  # NaN stays
    kl = terms.sum(-1)
    # Rounding can leave -1e-17; a NaN stays a NaN.
    return torch.where(kl < 0, torch.zeros_like(kl), kl)


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, min(MAX_ROWS, MAX_ELEMENTS // max(1, columns)))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _join(scores: Sequence[TokenScores]) -> TokenScores:
    if not scores:
        empty = torch.empty(0, dtype=torch.float64)
        return TokenScores(empty, torch.empty(0, dtype=torch.bool), empty, empty)
    return TokenScores(
        torch.cat([s.kl for s in scores]),
        torch.cat([s.top1 for s in scores]),
        torch.cat([s.nll_ref for s in scores]),
        torch.cat([s.nll_test for s in scores]),
    )


def _mean_se(windows: Sequence[Tensor]) -> tuple[float, float | None]:
    mean = float(torch.cat([w.double() for w in windows]).mean())
    if len(windows) < 2:
        return mean, None
    means = torch.stack([w.double().mean() for w in windows])
    return mean, float(means.std()) / math.sqrt(len(windows))


def _quantile(values: Tensor, q: float) -> float:
    # torch.quantile refuses more than 2**24 values; kthvalue does not.
    if bool(values.isnan().any()):
        return math.nan
    k = min(values.numel(), max(1, math.ceil(q * values.numel())))
    return float(values.kthvalue(k).values)


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf if nll == nll else math.nan


def _scaled(error: float | None, factor: float) -> float | None:
    return None if error is None else error * factor


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

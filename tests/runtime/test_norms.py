"""Norms that a GPU computes in two passes: which they are, and what they compute."""

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from nstf.runtime.norms import fuse_norms


def model(device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    found = nn.Sequential(LlamaRMSNorm(512, 1e-5), Qwen3RMSNorm(512), Gemma3RMSNorm(512), nn.LayerNorm(512))
    for parameter in found.parameters():
        nn.init.normal_(parameter)
    return found.to(device, dtype)


def test_norms_like_llamas_are_fused_and_keep_their_names() -> None:
    fused = model()
    names = [type(module).__name__ for module in fused]
    fuse_norms(fused)
    fuse_norms(fused)  # a second time changes nothing
    assert [type(module).__name__ for module in fused] == names
    changed = [
        type(module) not in (LlamaRMSNorm, Qwen3RMSNorm, Gemma3RMSNorm, nn.LayerNorm) for module in fused
    ]
    assert changed == [True, True, False, False]
    assert isinstance(fused[0], LlamaRMSNorm) and isinstance(fused[1], Qwen3RMSNorm)


@torch.no_grad()
def test_on_a_cpu_they_compute_what_they_did() -> None:
    x, fused = torch.randn(3, 7, 512), model()
    fuse_norms(fused)
    assert torch.equal(fused(x), model()(x))


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_they_differ_by_a_rounding_at_most(dtype: torch.dtype) -> None:
    x, fused, plain = (
        torch.randn(2, 300, 512, device="cuda").to(dtype),
        model("cuda", dtype),
        model("cuda", dtype),
    )
    fuse_norms(fused)
    for own, other in zip(fused[:2], plain[:2], strict=True):
        found, expected = own(x).float(), other(x).float()
        step = torch.finfo(dtype).eps
        assert bool(((found - expected).abs() <= 2 * step * expected.abs()).all())
        assert (
            float((found != expected).float().mean()) < 0.01
        )  # sums in another order seldom round otherwise

import pytest
import torch
from torch import nn

from nstf.analyzers import roofline
from nstf.analyzers.roofline import (
    Device,
    attention_cost,
    measure_device,
    operator_cost,
    profile,
    weight_bytes,
)

DEVICE = Device("test", flops=100e9, bandwidth=10e9, source="given")


def run(module: nn.Module, x: torch.Tensor) -> tuple[str, float, float] | None:
    return operator_cost(module, (x,), module(x))


def test_a_linear_layer_counts_two_flops_a_weight_and_token():
    kind, flops, moved = run(nn.Linear(64, 32, bias=False), torch.zeros(2, 5, 64))
    assert (kind, flops) == ("linear", 2 * 10 * 64 * 32)
    assert moved == 4 * (10 * 64 + 10 * 32 + 64 * 32)


def test_a_convolution_counts_its_kernel_at_every_output():
    conv = nn.Conv2d(6, 8, 3, padding=1, groups=2, bias=False)
    kind, flops, _ = run(conv, torch.zeros(1, 6, 10, 10))
    assert (kind, flops) == ("conv", 2 * 8 * 100 * (3 * 9))


def test_an_embedding_reads_only_the_rows_it_needs():
    kind, flops, moved = run(nn.Embedding(1000, 16), torch.arange(4))
    assert (kind, flops, moved) == ("embedding", 0, 4 * 8 + 4 * 64 + 4 * 64)


def test_attention_counts_both_products_and_half_of_them_when_causal():
    q, k = torch.zeros(1, 4, 10, 8), torch.zeros(1, 2, 10, 8)
    full, moved = attention_cost(q, k, k, causal=False)
    assert full == 2 * 4 * 100 * 16
    assert attention_cost(q, k, k, causal=True)[0] == 2 * 4 * 55 * 16
    one = torch.zeros(1, 4, 1, 8)
    assert attention_cost(one, k, k, causal=True)[0] == 2 * 4 * 10 * 16
    assert moved == 4 * (320 + 160 + 160 + 320)


def test_encoded_layers_count_their_stored_bytes_and_dense_flops():
    class Stored(nn.Module):
        tree = "int"
        shape = (32, 64)

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(32, 32, dtype=torch.uint8))

    layer = nn.Linear(64, 32, bias=False)
    del layer._parameters["weight"]
    layer.weight_encoded = Stored()
    assert weight_bytes(layer) == 1024
    kind, flops, moved = operator_cost(layer, (torch.zeros(3, 64),), torch.zeros(3, 32))
    assert (kind, flops, moved) == ("linear", 2 * 3 * 64 * 32, 4 * (3 * 64 + 3 * 32) + 1024)


def test_expert_stacks_count_the_routes_taken():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(4, 16, 8))
            self.down_proj = nn.Parameter(torch.zeros(4, 8, 8))

    routes = torch.zeros(3, 2, dtype=torch.int64)
    cost = operator_cost(Experts(), (torch.zeros(3, 8), routes), torch.zeros(3, 8))
    assert cost[:2] == ("experts", 2 * 6 * (16 * 8 + 8 * 8))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.attn = Attention()
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.attn(self.embed(ids)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


def test_a_profile_names_every_operator_and_classes_it():
    model = Block()
    before = torch.nn.functional.scaled_dot_product_attention
    result = profile(model, lambda: model(torch.zeros(1, 12, dtype=torch.int64)),
                     lambda: model(torch.zeros(1, 1, dtype=torch.int64)), DEVICE, tokens=12, batch=1, repeats=1)  # fmt: skip
    prefill, decode = result.phases
    kinds = {o.name: o.kind for o in prefill.operators}
    assert kinds == {
        "embed": "embedding",
        "attn.qkv": "linear",
        "attn: attention products": "attention",
        "head": "linear",
    }
    assert result.parameters == 50 * 16 + 16 * 48 + 48
    assert result.weight_bytes == 4 * result.parameters
    assert decode.tokens == 1 and all(o.bound == "memory" for o in decode.operators)
    assert prefill.flops == sum(o.flops for o in prefill.operators)
    assert prefill.mfu == pytest.approx(prefill.flops / prefill.time_s / DEVICE.flops)
    # Nothing stays hooked or patched.
    assert torch.nn.functional.scaled_dot_product_attention is before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    data = result.to_json()
    assert data["device"]["ridge"] == 10 and data["phases"][0]["operators"][0]["intensity"] == 0


def test_the_ridge_separates_memory_bound_from_compute_bound():
    wide = nn.Linear(256, 256, bias=False)
    result = profile(wide, lambda: wide(torch.zeros(256, 256)), lambda: wide(torch.zeros(1, 256)), DEVICE,
                     tokens=256, batch=1, repeats=1)  # fmt: skip
    assert [p.operators[0].bound for p in result.phases] == ["compute", "memory"]


def test_a_slow_pass_is_not_run_seven_times(monkeypatch):
    """A million sequences took hours without a word."""
    model, runs = nn.Linear(4, 4), []

    def run() -> None:
        runs.append(model(torch.zeros(1, 4)))

    profile(model, run, None, DEVICE, tokens=1, batch=1)
    assert len(runs) == 7
    monkeypatch.setattr(roofline, "SLOW_S", 0.0)
    result = profile(model, run, None, DEVICE, tokens=1, batch=1)
    assert len(runs) == 7 + 3 and [o.calls for o in result.phases[0].operators] == [1]


def test_hooks_are_removed_after_an_error():
    model = Block()

    def broken() -> None:
        model(torch.zeros(1, 2, dtype=torch.int64))
        raise RuntimeError("stop")

    before = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="stop"):
        profile(model, broken, None, DEVICE, tokens=2, batch=1)
    assert torch.nn.functional.scaled_dot_product_attention is before
    assert not any(m._forward_hooks for m in model.modules())


def test_the_peaks_of_this_machine_are_plausible():
    device = measure_device("cpu", seconds=0.02)
    assert 1e8 < device.flops < 1e14 and 1e8 < device.bandwidth < 1e13 and device.source == "measured"

"""Quantised pages and predicted blocks in torch, against the masked reference, over generated plans."""

import pytest
import torch
from torch import Tensor

from nstf.runtime.attention_plan import GroupPlan, HeadPlan, LayerPlan
from nstf.runtime.attention_stored import StoredRows, attend_stored
from nstf.runtime.kv_formats import PLAIN, KVFormat, reference_attention, stored

FORMATS = (
    PLAIN,
    KVFormat(8, "token", True),
    KVFormat(4, "channel", False),
    KVFormat(4, "token", False),
    KVFormat(2, "channel", True),
)


def plan_of(generator: torch.Generator) -> LayerPlan:
    """Four heads on two KV heads, whatever a plan may say of them."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def head() -> HeadPlan:
        kind = number(0, 3)
        if kind == 1:
            params = {"sink": number(0, 100), "window": number(1, 200)}
            return HeadPlan("streaming", params, number(0, 300), 0.0, 1.0)
        if kind == 2:
            params = {"threshold": number(1, 10) / 10, "stride": 8 * number(1, 3)}
            return HeadPlan("block_sparse", params, number(0, 300), 0.0, 1.0)
        return HeadPlan("full", {}, 0, 0.0, 1.0)

    groups = tuple(
        GroupPlan(0, 0, 0, FORMATS[number(0, len(FORMATS))], FORMATS[number(0, len(FORMATS))])
        for _ in range(2)
    )
    return LayerPlan(tuple(head() for _ in range(4)), groups)


@pytest.mark.parametrize("seed", range(8))
def test_a_generated_plan_attends_as_the_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = plan_of(generator)
    cuts = (256, 384, 450, 451, 512)
    q, k, v = (torch.randn(n, cuts[-1], 32, generator=generator).half().float() for n in (4, 2, 2))
    q = q + k.repeat_interleave(2, dim=0)[:, torch.arange(cuts[-1]) // 4]
    rows = [(StoredRows(g.keys), StoredRows(g.values)) for g in layer.groups]
    start = 0
    for end in cuts:
        far = tuple(
            torch.cat([rows[g][which].read(x[g : g + 1, :end]) for g in range(2)])
            for which, x in enumerate((k, v))
        )
        found = attend_stored(
            q[:, start:end], (k[:, :end], v[:, :end]), (far[0], far[1]), (0, 0, 1, 1), layer.heads, 32**-0.5
        )
        wanted = reference_attention(q[:, start:end], k[:, :end], v[:, :end], layer)
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
        start = end


def test_pages_are_read_back_the_same_in_whatever_steps_they_came() -> None:
    x = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(0)).half().float()
    rows, found = StoredRows(FORMATS[2]), Tensor()
    for end in (10, 64, 65, 200, 300):
        found = rows.read(x[:, :end])
        assert found.shape[1] == end // 64 * 64
    assert torch.equal(found, stored(x, FORMATS[2])[:, :256])

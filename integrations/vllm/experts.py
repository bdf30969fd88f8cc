"""Mixtures of experts: every rank has whole experts, and gives the sum of what its own ones contribute.

vLLM adds up what its ranks give, whether it would cut each expert among them or deal the experts out
(`--enable-expert-parallel`). So both are the same here, and no encoded matrix of an expert has to be cut.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from nstf.errors import UnsupportedError
from nstf.kernels.formats.shards import Span
from nstf.kernels.linear import linear
from nstf.kernels.torch.rows import expert
from nstf.runtime.operators import weight_of
from nstf.runtime.parameter import EncodedParameter
from nstf.runtime.rank_folder import RankFolder

STACKS = ("gate_up_proj", "down_proj")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class EncodedExperts(FusedMoEMethodBase):  # type: ignore[misc]
    """Stacks of a rank's experts, `layer.encoded`, which the loader fills: gate and up [experts, 2 wide, in], down.

    Raises UnsupportedError for experts that are computed in another way.
    """

    def __init__(self, layer: Any, prefix: str) -> None:
        super().__init__(layer.moe_config)
        activation = layer.activation.value
        for has, what in (
            (layer.moe_config.has_bias, "biases"),
            (activation not in _ACTIVATIONS, f"the activation {activation}"),
            (layer.apply_router_weight_on_input, "the router's weight on their input"),
        ):
            if has:
                raise UnsupportedError(
                    f"{prefix}: experts with {what} do not run encoded in vLLM; use nstf serve"
                )

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        layer.encoded = nn.ModuleList()
        layer.nstf_dtype = kwargs["params_dtype"]
        # Here and not in `apply`, which torch.compile looks into.
        layer.nstf_first = rank_experts(layer).start

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: no kernel of vLLM reads these weights."""

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *shared: object, **also: object
    ) -> Tensor:
        """What this rank's experts contribute, [tokens, in]. Shared experts are computed by vLLM."""
        gate_up, down = (stack.number for stack in layer.encoded)
        name = layer.activation.value
        found: Tensor = torch.ops.nstf.experts(
            x, topk_weights, topk_ids, gate_up, down, layer.nstf_first, name
        )
        return found

    def fill(self, layer: Any, folder: RankFolder, device: torch.device) -> None:
        """The rank's experts from a folder. Raises UnsupportedError for stacks that lie otherwise."""
        own, hidden = rank_experts(layer), layer.hidden_size
        parts = [folder.part(f"{layer.layer_name}.{stack}", own) for stack in STACKS]
        gate_up, down = (part.shape for part in parts)
        if gate_up[2] != hidden or (down[1], 2 * down[2]) != (hidden, gate_up[1]):
            raise UnsupportedError(
                f"{layer.layer_name}: stacks of the shapes {list(gate_up)} and {list(down)} do not run encoded in vLLM; "
                "use nstf serve"
            )
        for stack, part in zip(STACKS, parts, strict=True):
            if expert(part, 0) is None:
                raise UnsupportedError(
                    f"{layer.layer_name}.{stack}: its format does not give single experts; use nstf serve"
                )
            layer.encoded.append(EncodedParameter(part, layer.nstf_dtype).to(device))


def rank_experts(layer: Any) -> Span:
    """Which experts this rank has. Raises UnsupportedError where ranks do not divide them."""
    parallel, count = layer.moe_config.moe_parallel_config, layer.global_num_experts
    rank, ranks = (
        (parallel.ep_rank, parallel.ep_size) if parallel.use_ep else (parallel.tp_rank, parallel.tp_size)
    )
    if count % ranks:
        raise UnsupportedError(f"{layer.layer_name}: {count} experts cannot be divided by {ranks} ranks")
    return Span(0, rank * count // ranks, (rank + 1) * count // ranks)


# One operator, which torch.compile takes whole: the loop below asks on the host which experts are hit.
@torch.library.custom_op("nstf::experts", mutates_args=())
def _experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: int, down: int, first: int, activation: str
) -> Tensor:
    stacks = [weight_of(number).encoded for number in (gate_up, down)]
    act = _ACTIVATIONS[activation]

    def contribution(number: int, rows: Tensor) -> Tensor:
        one, other = (expert(stack, number) for stack in stacks)
        assert one is not None and other is not None  # checked when they were loaded
        gate, up = linear(rows, one).chunk(2, -1)
        return linear(act(gate) * up, other)

    out, own = torch.zeros_like(x), ids - first
    count = stacks[0].shape[0]
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A graph has the same launches for all tokens: every expert, with a weight of zero for who did not ask for it.
        for number in range(count):
            weight = (weights * (own == number)).sum(-1, keepdim=True)
            # Not times zero: an expert that a token did not ask for may overflow on it.
            some = contribution(number, x) * weight.to(x.dtype)
            out += torch.where(weight != 0, some, 0)
        return out
    for number in torch.unique(own[(own >= 0) & (own < count)]).tolist():
        token, choice = torch.where(own == number)
        some = contribution(number, x[token]) * weights[token, choice, None].to(x.dtype)
        out.index_add_(0, token, some)
    return out


@_experts.register_fake
def _(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: int, down: int, first: int, activation: str
) -> Tensor:
    return torch.empty_like(x)

"""The classes that vLLM looks up: quantisation method, products, embedding and loader. Importing this registers them.

No layer has weights of its own: the loader gives every layer the encoded parts of its rank, one for each tensor of the
checkpoint that the layer joins (q, k and v; gate and up). So they may be stored in unlike formats, and nothing is padded.
Each product is one opaque operator (runtime/operators.py), which torch.compile takes whole.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from nstf.errors import CorruptError, UnsupportedError, UsageError
from nstf.integrations.vllm.experts import STACKS, EncodedExperts
from nstf.runtime import operators
from nstf.runtime.parameter import EncodedParameter
from nstf.runtime.rank_folder import RankFolder
from nstf.runtime.tensor_parallel import Span

VERSION = 1


@register_quantization_config("nstf")
class NstfConfig(QuantizationConfig):  # type: ignore[misc]
    """The folder's quantization_config. tensors: as in integrations/transformers.py."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__()
        self.tensors = tensors

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NstfConfig":
        if config.get("version") != VERSION or not isinstance(config.get("tensors"), dict):
            raise CorruptError(
                f"the folder's quantization_config is of version {config.get('version')}, this nstf knows {VERSION}"
            )
        return cls(config["tensors"])

    @classmethod
    def get_name(cls) -> str:
        return "nstf"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """Ours for a layer whose tensors are encoded, vLLM's own for one that is stored dense."""
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if not isinstance(layer, LinearBase | VocabParallelEmbedding):
            return None
        if not prefix:  # some models do not name their table to vLLM
            prefix = next(
                (n.removesuffix(".weight") for n in self.tensors if n.endswith("embed_tokens.weight")), ""
            )
        encoded = self._encoded(prefix, [f"{name}.weight" for name in self.sources(prefix)])
        if isinstance(layer, VocabParallelEmbedding):
            return EncodedEmbedding() if encoded else UnquantizedEmbeddingMethod()
        return EncodedLinear() if encoded else UnquantizedLinearMethod()

    def _experts(self, layer: RoutedExperts, prefix: str) -> EncodedExperts | None:
        if self._encoded(prefix, [f"{prefix}.{name}" for name in STACKS]):
            return EncodedExperts(layer, prefix)
        if any(name.startswith(f"{prefix}.") for name in self.tensors):
            raise UnsupportedError(
                f"{prefix}: only experts in stacks ({', '.join(STACKS)}) run encoded in vLLM; use nstf serve"
            )
        return None

    def _encoded(self, prefix: str, names: list[str]) -> bool:
        """Whether the tensors of a layer are encoded. Raises UnsupportedError where some are."""
        encoded = [name in self.tensors for name in names]
        if any(encoded) != all(encoded):
            raise UnsupportedError(f"{prefix}: of {', '.join(names)} some are encoded and some are not")
        return all(encoded)

    def sources(self, prefix: str) -> list[str]:
        """The checkpoint's modules that a module of vLLM joins."""
        owner, _, leaf = prefix.rpartition(".")
        joined = self.packed_modules_mapping.get(leaf, [leaf])
        return [f"{owner}.{name}" if owner else name for name in joined]


class _Encoded(QuantizeMethodBase):  # type: ignore[misc]
    """What products and embeddings share: `layer.encoded`, filled by the loader."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        layer.encoded = nn.ModuleList()
        if "params_dtype" in kwargs:
            layer.nstf_dtype = kwargs["params_dtype"]

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., rows of all parts]."""
        parts = [operators.linear(x, parameter, None) for parameter in layer.encoded]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return out if bias is None else out + bias


class EncodedLinear(_Encoded, LinearMethodBase):  # type: ignore[misc]
    """Products with what a rank holds."""


class EncodedEmbedding(_Encoded):
    """A table by rows, and a head with it; vLLM pads the vocabulary, and what it pads has logits of zero."""

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        found: Tensor = operators.embedding(ids, layer.encoded[0])
        return found

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = super().apply(layer, x, None)
        missing = layer.num_embeddings_per_partition - out.shape[-1]
        out = torch.nn.functional.pad(out, (0, missing)) if missing else out
        return out if bias is None else out + bias

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """The head reads the table's parts, whenever the loader fills them."""
        layer.encoded = embed_tokens.encoded
        return layer


@register_model_loader("nstf")
class NstfLoader(BaseModelLoader):  # type: ignore[misc]
    """Gives every layer the encoded parts of its rank; what is stored dense goes through the model's own loader."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing: the folder is local."""

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        path = Path(model_config.model)
        if not path.is_dir():
            raise UsageError(
                f"{path} is no folder: write one with `nstf export FILE --to transformers -o FOLDER`"
            )
        stated = getattr(model_config.hf_config, "quantization_config", None)
        config = NstfConfig.from_config(stated if isinstance(stated, dict) else {})
        folder = RankFolder(path, config.tensors)
        made: dict[tuple[str, int, int], EncodedParameter] = {}
        for prefix, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if not isinstance(method, _Encoded | EncodedExperts) or len(module.encoded):
                continue
            device = next(iter(model.parameters())).device
            if isinstance(method, EncodedExperts):
                method.fill(module, folder, device)
                continue
            own = module.quant_config if isinstance(module, LinearBase) else None
            names = (own or config).sources(prefix)
            parts = getattr(module, "output_partition_sizes", names)
            if module.tp_size > 1 and len(parts) > len(names):
                raise UnsupportedError(
                    f"{prefix}: the checkpoint joins its matrices, which is not divided over ranks yet"
                )
            for number, name in enumerate(names):
                span = rank_span(module, number)
                encoded = folder.part(f"{name}.weight", span)
                key = (folder.stored(f"{name}.weight"), span.start if span else 0, span.stop if span else 0)
                if key not in made:
                    made[key] = EncodedParameter(encoded, module.nstf_dtype).to(device)
                module.encoded.append(made[key])
        tied = {n for n, entry in config.tensors.items() if "shared" in entry}
        model.load_weights((name, value) for name, value in folder.dense() if name not in tied)


def rank_span(layer: Any, number: int) -> Span | None:
    """What this rank holds of the layer's tensor of that number; None: all of it."""
    if isinstance(layer, VocabParallelEmbedding):
        at = layer.shard_indices
        return Span(0, at.org_vocab_start_index, at.org_vocab_end_index) if layer.tp_size > 1 else None
    if layer.tp_size == 1:
        return None
    if isinstance(layer, RowParallelLinear):
        size = layer.input_size_per_partition
        return Span(1, layer.tp_rank * size, (layer.tp_rank + 1) * size)
    if isinstance(layer, ColumnParallelLinear):
        size, rank = layer.output_partition_sizes[number], layer.tp_rank
        if isinstance(layer, QKVParallelLinear) and number > 0:
            rank //= layer.num_kv_head_replicas  # ranks beyond the KV heads share them
        return Span(0, rank * size, (rank + 1) * size)
    return None

"""The graph of a Llama for ONNX Runtime: input_ids, attention_mask and past keys and values in, logits and present ones out.

Inputs and outputs are named as Optimum and ONNX Runtime GenAI name them. Attention is `GroupQueryAttention`
(com.microsoft: rotary embedding, causal mask and cache in one operator), products are `MatMulNBits`, a quantised table
`GatherBlockQuantized`; the rest are standard operators, which ONNX Runtime fuses by itself.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nstf.errors import UnsupportedError
from nstf.kernels.formats import EncodedTensor
from nstf.runtime.artifact.header import short
from nstf_convert.export import onnx_weights as weights
from nstf_convert.export.gguf_names import check_windows, llama3_factors

MICROSOFT = "com.microsoft"
OPSET = 18
MODEL_TYPES = ("llama", "qwen2", "qwen3")
# Whole numbers of a config that the graph is made by.
_COUNTS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
# What the graph reads. Frequencies of rotary embeddings, which old checkpoints hold, it computes itself.
_PLACES = re.compile(
    r"model\.(embed_tokens|norm)\.weight|lm_head\.(weight|bias)|model\.layers\.\d+\.("
    r"(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)\.weight|"
    r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.(weight|bias)|self_attn\.rotary_emb\.inv_freq)"
)


def check(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for a model whose graph is not written here."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UnsupportedError(
            f"target 'onnx' has graphs of models of type {', '.join(MODEL_TYPES)}, not {str(kind)[:40]!r}: give the .onnx "
            "that was converted as `source`, or use target 'hf' and Optimum"
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedError(
            f"target 'onnx': the activation {config.get('hidden_act')!r} is not written (silu is)"
        )
    rope = (config.get("rope_parameters") or {}).get("rope_type", "default")
    if rope not in ("default", "linear", "llama3"):
        raise UnsupportedError(
            f"target 'onnx': rope scaling {str(rope)[:40]!r} is not written (linear and llama3 are)"
        )
    for key in _COUNTS:  # int() would take a text, which loading refuses
        if config.get(key) is not None and type(config[key]) is not int:
            raise UnsupportedError(
                f"target 'onnx': its config.json says {key} is {short(config[key])}, expected a whole number; "
                "fetch or convert it again"
            )
    check_windows("onnx", config)


def check_names(names: Iterable[str]) -> None:
    """Raises UnsupportedError for a tensor that the graph does not read: a classifier's head, say, without which the file
    would be another model."""
    for name in names:
        if not _PLACES.fullmatch(name):
            raise UnsupportedError(
                f"target 'onnx': tensor {name!r} has no place in a language model's graph; use target 'hf' and Optimum"
            )


def head_dim(config: Mapping[str, Any]) -> int:
    """Numbers of a head."""
    return int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))


def rotary_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of the tables of cosines and sines: float32, half a head for each position."""
    return 4 * int(config["max_position_embeddings"]) * (head_dim(config) // 2) * 2


class Graph:
    """Nodes and initialisers of one model. get: the encoded tensor of a name. Only the constructor reads the config."""

    def __init__(self, config: Mapping[str, Any], side: weights.SideFile, get: Any, names: set[str]) -> None:
        self.config, self._side, self._get, self._names = config, side, get, names
        self.nodes: list[Any] = []
        self.hidden = int(config["hidden_size"])
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config.get("num_key_value_heads") or self.heads)
        self.head_dim = head_dim(config)
        self.layers, self.vocab = int(config["num_hidden_layers"]), int(config["vocab_size"])
        self.eps = float(config["rms_norm_eps"])
        self.rotary = self._rotary()
        self._table: tuple[EncodedTensor, Any] | None = None

    def build(self) -> Any:
        """The model, without the side file's bytes."""
        import onnx
        from onnx import TensorProto, helper

        self._constants()
        x = self._embedding()
        for layer in range(self.layers):
            x = self._layer(layer, x)
        self._head(self._norm("model.norm", x))
        layers = range(self.layers)
        past = ["batch", self.kv_heads, "past", self.head_dim]
        present = ["batch", self.kv_heads, "total", self.head_dim]
        sides = [(i, side) for i in layers for side in ("key", "value")]
        value, whole, real = helper.make_tensor_value_info, TensorProto.INT64, TensorProto.FLOAT
        inputs = [
            value("input_ids", whole, ["batch", "sequence"]),
            value("attention_mask", whole, ["batch", "total"]),
        ]
        inputs += [value(f"past_key_values.{i}.{s}", real, past) for i, s in sides]
        outputs = [value("logits", real, ["batch", "sequence", self.vocab])]
        outputs += [value(f"present.{i}.{s}", real, present) for i, s in sides]
        graph = helper.make_graph(self.nodes, "nstf", inputs, outputs, self._side.initialisers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, producer_name="nstf")
        model.ir_version = 10
        return model

    def _node(self, kind: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, domain=domain, **attributes))
        return output

    def _constants(self) -> None:
        """Rotary tables and small numbers; lengths from the mask."""
        add = self._side.add
        add("eps", np.array([self.eps], np.float32))
        add("one", np.array([1], np.int64))
        add("axis_last", np.array([-1], np.int64))
        add("axis_length", np.array([1], np.int64))
        cos, sin = self.rotary
        add("cos_cache", cos)
        add("sin_cache", sin)
        total = self._node("ReduceSum", ["attention_mask", "axis_length"], "mask_sum", keepdims=0)
        last = self._node("Sub", [total, "one"], "mask_last")
        self._node("Cast", [last], "seqlens_k", to=6)
        shape = self._node("Shape", ["attention_mask"], "mask_shape", start=1, end=2)
        self._node("Cast", [shape], "total_length", to=6)

    def _rotary(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        rope = self.config.get("rope_parameters") or {}
        base = float(rope.get("rope_theta", self.config.get("rope_theta", 10000.0)))
        # As transformers computes them: in float32, powers of the base over even positions.
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        frequency = (np.float32(1.0) / np.float32(base) ** exponents).astype(np.float32)
        if rope.get("rope_type") == "linear":
            frequency = frequency / np.float32(rope["factor"])
        elif rope.get("rope_type") == "llama3":
            frequency = frequency / llama3_factors(rope, base, self.head_dim)
        at = np.arange(int(self.config["max_position_embeddings"]), dtype=np.float32)
        angle = np.outer(at, frequency).astype(np.float32)
        return np.cos(angle), np.sin(angle)

    def _embedding(self) -> str:
        name = "model.embed_tokens.weight"
        encoded = self._get(name)
        # ONNX Runtime's operator takes tables of 4 and 8 bits.
        if weights.block_of(encoded) is None or weights.BITS[encoded.tree.params.bits] == 2:
            place = self._side.add("table", weights.dense(encoded))
            self._table = (encoded, {"table": (place, np.float32, encoded.shape)})
            return self._node("Gather", ["table", "input_ids"], "embedded", axis=0)
        parts = weights.blocks(encoded)
        rows = parts.data.shape[0]
        places = {"data": self._side.add("table_codes", parts.data, (rows, parts.data.size // rows))}
        inputs = ["table_codes", "input_ids", "table_scale"]
        places["scale"] = self._side.add("table_scale", parts.scale)
        if parts.zeros is not None:
            places["zeros"] = self._side.add("table_zeros", parts.zeros)
            inputs.append("table_zeros")
        self._table = (encoded, places)
        settings = {"gather_axis": 0, "quantize_axis": 1, "block_size": parts.block, "bits": parts.bits}
        return self._node("GatherBlockQuantized", inputs, "embedded", MICROSOFT, **settings)

    def _head(self, x: str) -> None:
        if "lm_head.weight" in self._names:
            self._node("Identity", [self._linear("lm_head", x)], "logits")
            return
        encoded, places = self._table  # type: ignore[misc]
        rows, cols = encoded.shape
        if "table" in places:
            turned = self._node("Transpose", ["table"], "table_turned", perm=[1, 0])
            self._node("MatMul", [x, turned], "logits")
            return
        parts = weights.blocks(encoded)
        inputs = [x, "head_codes", "head_scale"]
        self._side.again("head_codes", np.uint8, parts.data.shape, places["data"])
        self._side.again("head_scale", np.float32, parts.scale.shape, places["scale"])
        if parts.zeros is not None:
            self._side.again("head_zeros", np.uint8, parts.zeros.shape, places["zeros"])
            inputs.append("head_zeros")
        self._node(
            "MatMulNBits",
            inputs,
            "logits",
            MICROSOFT,
            K=cols,
            N=rows,
            bits=parts.bits,
            block_size=parts.block,
        )

    def _linear(self, module: str, x: str) -> str:
        encoded: EncodedTensor = self._get(f"{module}.weight")
        rows, cols = encoded.shape
        if weights.block_of(encoded) is None:
            self._side.add(f"{module}.weight", weights.dense(encoded))
            turned = self._node("Transpose", [f"{module}.weight"], f"{module}.turned", perm=[1, 0])
            out = self._node("MatMul", [x, turned], f"{module}.product")
        else:
            parts = weights.blocks(encoded)
            inputs = [x, f"{module}.codes", f"{module}.scale"]
            self._side.add(inputs[1], parts.data)
            self._side.add(inputs[2], parts.scale)
            if parts.zeros is not None:
                inputs.append(f"{module}.zeros")
                self._side.add(inputs[3], parts.zeros)
            settings = {"K": cols, "N": rows, "bits": parts.bits, "block_size": parts.block}
            out = self._node("MatMulNBits", inputs, f"{module}.product", MICROSOFT, **settings)
        if f"{module}.bias" not in self._names:
            return out
        self._side.add(f"{module}.bias", weights.dense(self._get(f"{module}.bias")))
        return self._node("Add", [out, f"{module}.bias"], f"{module}.biased")

    def _norm(self, module: str, x: str, at: str = "") -> str:
        at = at or module
        self._side.add(f"{module}.weight", weights.dense(self._get(f"{module}.weight")))
        square = self._node("Mul", [x, x], f"{at}.square")
        mean = self._node("ReduceMean", [square, "axis_last"], f"{at}.mean", keepdims=1)
        root = self._node("Sqrt", [self._node("Add", [mean, "eps"], f"{at}.sum")], f"{at}.root")
        unit = self._node("Div", [x, root], f"{at}.unit")
        return self._node("Mul", [unit, f"{module}.weight"], f"{at}.out")

    def _head_norm(self, module: str, x: str, heads: int) -> str:
        """Qwen 3's norm of each head."""
        self._side.add(f"{module}.split", np.array([0, 0, heads, self.head_dim], np.int64))
        self._side.add(f"{module}.join", np.array([0, 0, heads * self.head_dim], np.int64))
        split = self._node("Reshape", [x, f"{module}.split"], f"{module}.heads")
        normed = self._norm(module, split)
        return self._node("Reshape", [normed, f"{module}.join"], f"{module}.joined")

    def _layer(self, layer: int, x: str) -> str:
        from onnx import helper

        at = f"model.layers.{layer}"
        normed = self._norm(f"{at}.input_layernorm", x)
        q, k, v = (self._linear(f"{at}.self_attn.{p}_proj", normed) for p in "qkv")
        if f"{at}.self_attn.q_norm.weight" in self._names:
            q = self._head_norm(f"{at}.self_attn.q_norm", q, self.heads)
            k = self._head_norm(f"{at}.self_attn.k_norm", k, self.kv_heads)
        inputs = [q, k, v, f"past_key_values.{layer}.key", f"past_key_values.{layer}.value", "seqlens_k", "total_length",
                  "cos_cache", "sin_cache"]  # fmt: skip
        outputs = [f"{at}.attention", f"present.{layer}.key", f"present.{layer}.value"]
        settings = {"num_heads": self.heads, "kv_num_heads": self.kv_heads, "do_rotary": 1}
        self.nodes.append(
            helper.make_node(
                "GroupQueryAttention", inputs, outputs, name=outputs[0], domain=MICROSOFT, **settings
            )
        )
        x = self._node("Add", [x, self._linear(f"{at}.self_attn.o_proj", outputs[0])], f"{at}.attended")
        normed = self._norm(f"{at}.post_attention_layernorm", x)
        gate = self._linear(f"{at}.mlp.gate_proj", normed)
        up = self._linear(f"{at}.mlp.up_proj", normed)
        sigmoid = self._node("Sigmoid", [gate], f"{at}.mlp.sigmoid")
        active = self._node(
            "Mul", [self._node("Mul", [gate, sigmoid], f"{at}.mlp.silu"), up], f"{at}.mlp.active"
        )
        return self._node("Add", [x, self._linear(f"{at}.mlp.down_proj", active)], f"{at}.out")

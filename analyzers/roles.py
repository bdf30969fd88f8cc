"""The role of a tensor in its model, from its name and shape, and the type of its module when that is known."""

from collections.abc import Sequence

Shape = tuple[int, ...]

ROLES = (
    "q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", "embedding", "position", "head", "expert_stack",
    "router", "conv", "norm", "bias", "other",
)  # fmt: skip

# The last part of a parameter's name, without `.weight`, where that alone decides.
_BY_LAST = {
    # Llama, Qwen, Gemma, Mistral, OPT, Whisper, Phi; DistilBERT; GGUF
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "q_a_proj": "q", "q_b_proj": "q",
    "q_lin": "q", "k_lin": "k", "v_lin": "v", "out_lin": "o", "attn_q": "q", "attn_k": "k", "attn_v": "v",
    "attn_output": "o", "wq": "q", "wk": "k", "wv": "v",
    "qkv_proj": "qkv", "query_key_value": "qkv", "c_attn": "qkv", "Wqkv": "qkv", "qkv": "qkv", "in_proj_weight": "qkv",
    "attn_qkv": "qkv",
    "gate_proj": "gate", "ffn_gate": "gate", "wi_0": "gate", "w1": "gate",
    "up_proj": "up", "ffn_up": "up", "fc1": "up", "c_fc": "up", "lin1": "up", "dense_h_to_4h": "up", "wi": "up",
    "wi_1": "up", "w3": "up",
    "gate_up_proj": "gate_up",
    "down_proj": "down", "ffn_down": "down", "fc2": "down", "lin2": "down", "dense_4h_to_h": "down", "w2": "down",
    "embed_tokens": "embedding", "wte": "embedding", "word_embeddings": "embedding", "embed_in": "embedding",
    "token_embd": "embedding", "tok_embeddings": "embedding", "shared": "embedding",
    "token_type_embeddings": "embedding",
    "wpe": "position", "embed_positions": "position", "position_embeddings": "position",
    "position_embedding": "position", "pos_embed": "position",
    "lm_head": "head", "embed_out": "head", "proj_out": "head", "classifier": "head", "score": "head",
    "router": "router", "shared_expert_gate": "router",
}  # fmt: skip

# Where the last part is a common word, it decides only inside attention, or only outside.
_IN_ATTENTION = {
    "q": "q", "k": "k", "v": "v", "o": "o", "query": "q", "key": "k", "value": "v", "dense": "o", "out_proj": "o",
    "c_proj": "o", "proj": "o", "wo": "o",
}  # fmt: skip
_OUTSIDE = {"c_proj": "down", "wo": "down"}
_MIXTURE = ("mlp", "moe", "block_sparse_moe", "feed_forward", "ffn")


def role_of(name: str, shape: Sequence[int], module_type: str | None = None) -> str:
    """One of ROLES. name: of the parameter, as in the checkpoint. module_type: class name of its module, if known.

    Covers the names of Llama, Qwen, Gemma, Mistral, Mixtral, Phi, GPT-2, GPT-NeoX, OPT, BERT, ViT, Whisper and
    T5; what is not recognised is `other`.
    """
    parts = [p for p in name.split(".") if p]
    last = parts[-1] if parts else ""
    if last == "bias" or last.endswith("_bias") or last.startswith("bias_"):
        return "bias"
    if last == "weight":
        parts = parts[:-1]
        last = parts[-1] if parts else ""
    kind = module_type or ""
    if "Norm" in kind or (len(shape) <= 1 and _is_norm(last)):
        return "norm"
    if len(shape) < 2:
        return "other"
    if len(shape) >= 3:
        return _of_many_axes(name, parts, shape, kind)
    if kind == "Embedding":
        return "position" if "position" in name or last == "wpe" else "embedding"
    if last in _BY_LAST:
        return _BY_LAST[last]
    return _of_common_word(parts, last, shape)


def layer_of(name: str) -> int | None:
    """The index of the block a tensor belongs to: the first number in its name, None if there is none."""
    return next((int(p) for p in name.split(".") if p.isascii() and p.isdigit()), None)


def _is_norm(last: str) -> bool:
    low = last.lower()
    return "norm" in low or low.startswith("ln_") or low in ("ln", "ln1", "ln2")


def _of_many_axes(name: str, parts: list[str], shape: Sequence[int], kind: str) -> str:
    if kind in ("Conv1d", "Conv2d", "Conv3d") or len(shape) > 3:
        return "conv"
    low = name.lower()
    if "expert" in low or "moe" in parts or "block_sparse_moe" in parts:
        return "expert_stack"
    if any(p.lower().startswith("conv") or "patch_embed" in p.lower() for p in parts):
        return "conv"
    if "position" in low or "pos_embed" in low or "cls_token" in low:
        return "position" if "pos" in low else "other"
    if parts and parts[-1] in ("gate_up_proj", "down_proj", "gate_proj", "up_proj", "w1", "w2", "w3"):
        return "expert_stack"
    # Kernels are a few taps wide; a matrix per expert is not.
    return "conv" if shape[-1] <= 16 else "other"


def _of_common_word(parts: list[str], last: str, shape: Sequence[int]) -> str:
    parents = parts[:-1]
    attention = any("attn" in p.lower() or "attention" in p.lower() for p in parents[-3:])
    if last == "gate" and parents and parents[-1] in _MIXTURE:
        return "router"
    if last == "dense" and parents and parents[-1] == "intermediate":
        return "up"
    if last == "dense" and parents and parents[-1] == "output" and not _attention_output(parents):
        return "down"
    if attention and last in _IN_ATTENTION:
        return _IN_ATTENTION[last]
    if last in _OUTSIDE:
        return _OUTSIDE[last]
    if last == "output" and len(parts) == 1:
        return "head"  # GGUF and the original Llama files
    if last == "decoder" and "predictions" in parents:
        return "head"
    return "other"


def _attention_output(parents: list[str]) -> bool:
    """Whether `... .output` is the attention's (BERT: attention.output.dense) and not the block's."""
    return len(parents) > 1 and ("attention" in parents[-2].lower() or "attn" in parents[-2].lower())

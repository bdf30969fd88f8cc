"""Attention of prompts: transformers' "sdpa", which attends the same way whether a graph is captured or not.

A causal prompt needs no mask, and without one torch takes its fastest kernel. transformers 5.17 makes a mask all the same
while a graph is captured: then another kernel runs, which rounds differently and wants every KV head repeated. 5.23 makes
none. So prompts run under a name of their own in transformers' registries, with a mask function that does not ask whether a
graph is captured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

NAME = "nstf_prompt"


def prompt_mask(**given: Any) -> Tensor | None:
    """The mask function of transformers: None for all tokens of a prompt, where no window is shorter than it; else the mask
    of "sdpa"."""
    length, window = given["kv_length"], given.get("local_size")
    causal = given.get("allow_is_causal_skip", True) and given.get("attention_mask") is None
    if causal and given["q_length"] == length and (window is None or length < window):
        return None
    mask: Tensor | None = sdpa_mask(**given)
    return mask


@contextmanager
def prompt_attention(config: Any) -> Iterator[None]:
    """Inside, a model with this config that attends by "sdpa" attends as above. Other calls of the model at the same time
    compute what they would."""
    if config._attn_implementation != "sdpa":
        yield
        return
    AttentionInterface.register(NAME, sdpa_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, prompt_mask)
    config._attn_implementation_internal = NAME  # of this config alone, not of those inside it
    try:
        yield
    finally:
        if config._attn_implementation == NAME:  # else another one was set meanwhile
            config._attn_implementation_internal = "sdpa"

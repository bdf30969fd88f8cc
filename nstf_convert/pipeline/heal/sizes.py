"""How large the steps of healing are: what runs, and what is predicted, goes by these."""

# Windows of a step, and looks at the windows that choose. A GPU wants work and makes both cheap.
WINDOWS = {"cpu": 1, "cuda": 4}
EVALUATIONS = {"cpu": 5, "cuda": 15}
# Inputs of a step of models that are no language models. One image says little about the others.
INPUTS = 32
# What healing keeps for a backward pass, at most: of language models layers are recomputed above it, of other models a step
# is taken in parts.
ACTIVATION_BYTES = 3 << 29
# Logits of this many elements at a time: 16 MiB in float32 on a CPU, 512 MiB on a GPU, of which about four are alive.
LOGIT_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}
ALIVE_LOGITS = 4
# Models that are no language models and have more weights keep their codes: each tuned one takes so many bytes.
LARGEST_CODES, CODE_BYTES = 1 << 26, 24


def layer_bytes(tokens: int, hidden: int, inner: int, size: int) -> int:
    """About what one layer of a transformer keeps for a backward pass over `tokens` tokens, in numbers of `size` bytes."""
    return size * tokens * (16 * hidden + 5 * inner)

"""Whether a model can have an attention plan and the machine can make one, before anything that takes long."""

from dataclasses import dataclass
from typing import Any

from nstf.errors import UnsupportedError, UsageError
from nstf.runtime.kv_formats import BLOCK
from nstf_convert.made_up import longest_window
from nstf_convert.pipeline.attention import simulate
from nstf_convert.pipeline.attention.contexts import SHORTEST, WINDOWS, check_length
from nstf_convert.pipeline.attention.measured import LOGITS
from nstf_convert.pipeline.attention.profile import FORMATS, SAMPLED_BLOCKS
from nstf_convert.pipeline.calibrate.gradients import HEAD_ELEMENTS
from nstf_convert.pipeline.machine import BASE_BYTES, GPU_BASE_BYTES, Machine
from nstf_convert.pipeline.session import Session

# Tokens of a context when none is asked for, where the model and the text have as many.
CONTEXT = 2048
# Texts that are taken where none are given: code and prose.
OWN_TEXTS = 2
# Copies that exist at a time, of float32 numbers: of the stream and of the feed-forward's activations of one layer with
# their gradients; of queries, keys and values with all heads; of the weights [R, 128, T] of a block; of logits.
LAYER_COPIES, HEAD_COPIES, BLOCK_COPIES, LOGIT_COPIES = 12, 10, 8, 6
# Of a group's keys or values while they are quantised.
STORED_COPIES = 8


@dataclass(frozen=True)
class Sizes:
    """What decides about the memory of a profile: of the model, and texts that contexts are cut from."""

    layers: int
    width: int
    inner: int
    heads: int
    groups: int
    head_dim: int
    vocabulary: int
    texts: int

    @classmethod
    def of(cls, config: Any, texts: int) -> "Sizes":
        """Of transformers' config of a text model."""
        heads, width = config.num_attention_heads, config.hidden_size
        inner = getattr(config, "intermediate_size", None)
        return cls(
            config.num_hidden_layers,
            width,
            inner if isinstance(inner, int) else 4 * width,
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or width // heads,
            config.vocab_size,
            texts,
        )


def check(session: Session) -> None:
    """Raises UnsupportedError for a model that no plan fits, UsageError for a context that its positions or the bound on
    memory do not hold."""
    options = session.options
    if session.model is None:
        raise UnsupportedError(f"{options.model} cannot be run: {session.model_reason}")
    model = session.model
    if not model.is_causal_lm:
        raise UnsupportedError(f"{options.model} is not a language model: it has no KV cache to plan")
    simulate.check(model.module)
    limit = longest_window(model)
    wanted = options.context or min(CONTEXT, limit)
    check_length(wanted, limit)
    sizes = Sizes.of(model.module.config.get_text_config(decoder=True), len(options.datasets) or OWN_TEXTS)
    check_memory(sizes, wanted, session.machine)


def check_memory(sizes: Sizes, context: int, machine: Machine) -> None:
    """Raises UsageError when profile and choice at this context need more than the machine's bound, with one that fits."""
    found = beyond(sizes, context, machine)
    if found is None:
        return
    what, needed, bound = found
    fitting = context // BLOCK * BLOCK
    while fitting >= SHORTEST and beyond(sizes, fitting, machine) is not None:
        fitting -= BLOCK
    way = f"`context` {fitting} fits" if fitting >= SHORTEST else "no context fits"
    option = "`gpu_memory`" if what == "GPU memory" else "`memory`"
    raise UsageError(
        f"profiling attention at {context} tokens takes about {needed / 2**30:.1f} GiB of {what}, {bound / 2**30:.1f} are "
        f"allowed: {way}, or give more {option}"
    )


def beyond(sizes: Sizes, context: int, machine: Machine) -> tuple[str, int, int] | None:
    """(memory of what, bytes needed, bytes there are) where a context needs too much, else None."""
    work, waiting = needed_bytes(sizes, context, "cuda" if machine.on_gpu else "cpu")
    pairs = [("memory", BASE_BYTES + work + waiting, machine.host_bytes)]
    if machine.on_gpu:
        pairs = [
            ("GPU memory", work, machine.gpu_bytes),
            ("memory", GPU_BASE_BYTES + waiting, machine.host_bytes),
        ]
    return next((pair for pair in pairs if pair[1] > pair[2]), None)


def needed_bytes(sizes: Sizes, context: int, device: str) -> tuple[int, int]:
    """(bytes where the work is done, bytes that wait on the host) at the peak of profile, choice and report."""
    s, tokens = sizes, context // BLOCK * BLOCK
    attended = s.heads * s.head_dim
    weights = 2 * s.width * (attended + s.groups * s.head_dim) + 3 * s.width * s.inner
    blocks = min(SAMPLED_BLOCKS, tokens // BLOCK) * BLOCK
    heads = HEAD_COPIES * tokens * attended
    gradients = s.layers * blocks * attended
    # Inputs of all layers, one layer forward and backward with its weights, the logits' gradients.
    backward = tokens * s.width * s.layers + gradients + heads + weights
    backward += LAYER_COPIES * tokens * (s.width + s.inner)
    backward = max(
        backward,
        tokens * s.width * (s.layers + 2) + s.vocabulary * s.width + LOGIT_COPIES * HEAD_ELEMENTS[device],
    )
    # One group: values of all formats, or keys of one, and the weights of a block.
    score = gradients + heads + LAYER_COPIES * tokens * s.width + 3 * tokens * s.inner
    score += (len(FORMATS) + STORED_COPIES) * tokens * s.head_dim
    score += BLOCK_COPIES * (s.heads // s.groups) * BLOCK * tokens
    # The planned pass, and logits of both models.
    measure = (
        heads + LAYER_COPIES * tokens * s.width + 3 * tokens * s.inner + STORED_COPIES * tokens * s.head_dim
    )
    measure = max(measure, tokens * s.width + s.vocabulary * s.width + 2 * LOGIT_COPIES * LOGITS)
    # Outputs of dense attention on the contexts that choose and on those that report.
    waiting = 2 * WINDOWS * s.texts * tokens * s.width
    return 4 * max(backward, score, measure), 4 * waiting

"""A model that runs while its weights stay on disk.

The transformers skeleton lives on the meta device. A module's weights are fetched when its forward starts and
dropped when it ends, so that the memory in use is one module's weights plus the activations, whatever the
architecture. The same class runs the reference (weights from a checkpoint), a candidate mix (weights decoded
from encoded tensors) and a finished artifact, always in float32: bfloat16 arithmetic alone costs 0.0008 nats on
a 135 M model, as much as a good 6-bit file.
"""

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nstf.analyzers.same_draws import SameDraws
from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError, out_of_memory
from nstf.runtime.artifact.config import Limits, limits_of
from nstf_convert.device_weights import DeviceWeights
from nstf_convert.module_kinds import LINEAR_TYPES, buffers_to, conv1d, read_parts
from nstf_convert.own_forward import logits_of, needs_images, takes_embeddings

# Weights at most this large stay loaded: fetching them again costs more than the memory they take.
RESIDENT_BYTES = 256 * 1024
RESIDENT_POSITIONS = 8192
# Tokens the decoder of a speech model reads when the data has none.
DECODER_TOKENS = 32
# Outputs whose places are no tokens: nothing is averaged over them.
MAPS = ("predicted_depth", "reconstruction", "class_queries_logits")
# What a model is compared by: the first of these that it returns, several joined. The ends of an answer, the words of a
# model that learns from two tasks, text and images as the same vectors, a passage as one, depths, a larger image, masks.
OUTPUTS: tuple[tuple[str, ...], ...] = (
    ("logits",), ("last_hidden_state",), ("encoder_last_hidden_state",), ("start_logits", "end_logits"),
    ("prediction_logits",), ("text_embeds", "image_embeds"), ("text_embeds", "audio_embeds"), ("pooler_output",),
    *((name,) for name in MAPS),
)  # fmt: skip

# Shapes of inputs of which it is remembered that nothing is drawn for them.
MOST_SHAPES = 1024

Source = Callable[[str], Tensor]


class _Checkpoint(Protocol):
    config: dict[str, Any] | None
    ties: Mapping[str, str]

    @property
    def limits(self) -> Limits: ...

    def get(self, name: str) -> Tensor: ...

    def names(self) -> list[str]: ...


class StreamedModel:
    """A transformers model in float32 whose weights come from `source(name)` just in time."""

    def __init__(
        self,
        config: dict[str, Any],
        source: Source,
        ties: Mapping[str, str] | None = None,
        lazy: bool = False,
        device: torch.device | None = None,
        resident_bytes: int = 0,
        held: Collection[str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`config`: the Hugging Face config. `source`: parameter name -> tensor. `ties`: alias -> stored name.
        `lazy`: fetch nothing before the first forward, not even small tensors. `device`: where it runs (None: the
        CPU); `resident_bytes`: weights that may stay there between two uses. `held`: the names that the source has (None:
        all that the model has); buffers that are not among them stay as the model's code makes them: `missing_buffers`.
        `limits`: what a stranger's tensors allow the model to be made of.

        Raises CorruptError when a tensor does not have the shape its parameter has, and where `held` lacks the mean or the
        variance of a normalisation.
        """
        from nstf.runtime.skeleton import build_skeleton

        self.config = config
        self.module: Any = build_skeleton(config, limits=limits)
        # A cache would be filled twice where a layer is recomputed for its gradients. BLIP's text reads its own config.
        for part in self.module.modules():
            settings: Any = getattr(part, "config", None)
            if hasattr(settings, "use_cache"):
                settings.use_cache = False
        self.device = device or torch.device("cpu")
        self._ties = dict(ties or {})
        self._names = self._stored_names()
        self.weights = DeviceWeights(source, self.device, resident_bytes)
        buffers_to(self.module, self.device)
        self._fetchers: dict[nn.Module, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._held: Counter[nn.Module] = Counter()
        self._drawless: set[tuple[Any, ...]] = (
            set()
        )  # inputs of whose shapes a forward pass drew no random numbers
        parts = {kind: read_parts(kind) for kind in {type(module) for module in self.module.modules()}}
        self._readers = {
            child: parent
            for parent in self.module.modules()
            for name, child in parent.named_children()
            if name in parts[type(parent)]
        }
        self._holding = threading.Lock()
        self._buffers = self._held_buffers(held)
        self._pending: list[Callable[[], None]] = [self._fetch_buffers]
        for module, names in self._owners():
            self._attach(module, names)
        self.weights.read_ahead(
            {
                stored: module.get_parameter(local).numel()
                for module, names in self._owners()
                if module in self._fetchers
                for local, stored in names.items()
            }
        )
        if not lazy:
            self.settle()

    @classmethod
    def from_checkpoint(cls, checkpoint: _Checkpoint) -> "StreamedModel":
        """The original model, read lazily from its checkpoint."""
        if checkpoint.config is None:
            raise ValueError("the checkpoint has no config: its model cannot be run")

        return cls(
            checkpoint.config,
            checkpoint.get,
            checkpoint.ties,
            held=checkpoint.names(),
            limits=checkpoint.limits,
        )

    @classmethod
    def from_artifact(cls, artifact: Any) -> "StreamedModel":
        """The model of an open artifact, decoded module by module."""
        from nstf.runtime.tensors import decoded

        return cls(
            artifact.config(),
            lambda name: decoded(artifact, name),
            held=artifact.names(),
            limits=limits_of(artifact.manifest),
        )

    def stored_name(self, parameter: str) -> str:
        """The checkpoint's name of a parameter: the same, or the one it is tied to."""
        return self._names[parameter]

    def stored_parameters(self) -> list[str]:
        """The checkpoint's names of all parameters."""
        return sorted(set(self._names.values()))

    def stored_buffers(self) -> list[str]:
        """Names of the buffers that the source has, such as a batch normalisation's mean and variance. How many batches it
        has seen is none of them: nothing reads it."""
        return list(self._buffers)

    def _held_buffers(self, held: Collection[str] | None) -> list[str]:
        state = self.module.state_dict(keep_vars=True)
        names = [n for n in state if n not in self._names and not n.endswith("num_batches_tracked")]
        known = None if held is None else set(held)
        missing = [] if known is None else [n for n in names if n not in known]
        for name in missing:
            owner, _, local = name.rpartition(".")
            if local in ("running_mean", "running_var"):
                kind = type(self.module.get_submodule(owner)).__name__
                raise CorruptError(
                    f"tensor {name!r} is missing, a statistic of a {kind}: without it this is another network; save the "
                    "model with its buffers (state_dict), not its parameters alone"
                )
        self.missing_buffers = missing
        return [n for n in names if n not in missing]

    @property
    def missing_said(self) -> str:
        """`missing_buffers` in a few words: three names and how many there are; empty where none is missing."""
        names = self.missing_buffers
        if not names:
            return ""
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        count = f"{len(names)} buffer{'s' * (len(names) != 1)}"
        return f"lacks {count}, the code's own are used: {shown}"

    @property
    def is_causal_lm(self) -> bool:
        """True when the model predicts the next token of a text."""
        return (
            self.head is not None
            and type(self.module).__name__.endswith(
                ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
            )
            and not getattr(self.module.config, "is_encoder_decoder", False)
            and not hasattr(self.module.config, "ngram")  # ProphetNet's head reads other states than the last
            and not needs_images(self.module)
        )

    @property
    def head(self) -> nn.Module | None:
        """The module that maps hidden states to logits, or None."""
        get = getattr(self.module, "get_output_embeddings", None)
        head = get() if get is not None else None
        return head if isinstance(head, nn.Module) else None

    @property
    def _base(self) -> nn.Module:
        """The model below its head. Llama 4's text has it under another name than its class states."""
        base: nn.Module = self.module.base_model
        if base is self.module and (other := getattr(base, "model", None)) is not None:
            return other  # type: ignore[no-any-return]
        return base

    def hidden(self, ids: Tensor, cache: Any = None) -> Tensor:
        """The last hidden states of a text: ids [batch, tokens] -> [batch, tokens, hidden].

        cache: a transformers Cache that holds the tokens before `ids` and takes theirs, or None. Raises UnsupportedError
        where transformers cannot run the model as its config has it.
        """
        from nstf.runtime.generate import of_the_model

        self.settle()
        ids = ids.to(self.device)
        try:
            out = self._drawn(
                tuple(ids.shape) if cache is None else None,
                lambda: self._base(input_ids=ids, past_key_values=cache, use_cache=cache is not None),
            )
        except Exception as error:
            said = error if _is_ours(error) else of_the_model(error, self.module)
            if said is error:
                raise
            raise said from error
        return out.last_hidden_state  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of last hidden states [n, hidden] -> [n, vocabulary].

        By the forward of the model's own class, which may do more to them than multiply by the head.
        """
        if self.head is None:
            raise ValueError(f"{type(self.module).__name__} has no language model head")
        self.settle()
        if not takes_embeddings(self.module):
            return self.head(hidden)  # type: ignore[no-any-return]
        return logits_of(self.module, self._base, hidden)

    def head_inputs(self, hidden: Tensor) -> Tensor:
        """What the head's matrix is multiplied with for last hidden states [n, hidden]: them, or transformed ones."""
        if self.head is None or not self.transforms:
            return hidden
        found: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(lambda _, args: found.append(args[0]))
        try:
            self.logits(hidden)
        finally:
            handle.remove()
        return found[0].reshape(-1, found[0].shape[-1])

    @property
    def transforms(self) -> bool:
        """Whether last hidden states go through layers before the head reads them."""
        between = any(m is not self._base and m is not self.head for m in self.module.children())
        return between and takes_embeddings(self.module)

    def outputs(self, **inputs: Tensor) -> Tensor:
        """The main output of a model that is not a language model: logits, or the last hidden state, or what OUTPUTS names.

        An encoder-decoder that is given no `decoder_input_ids` gets some: the text itself, or words of its vocabulary.
        """
        self.settle()
        inputs = {n: v.to(self.device) for n, v in inputs.items()}
        extra: dict[str, Any] = {}
        if getattr(self.module.config, "is_encoder_decoder", False):
            extra["use_cache"] = False
            if "decoder_input_ids" not in inputs:
                extra["decoder_input_ids"] = self._decoder_inputs(inputs)
        shapes = tuple(sorted((n, *v.shape) for n, v in inputs.items()))
        out = self._drawn(shapes, lambda: self.module(**inputs, **extra))
        for names in OUTPUTS:
            values = [v for v in (getattr(out, name, None) for name in names) if isinstance(v, Tensor)]
            if len(values) == len(names):
                joined = values[0] if len(values) == 1 else torch.cat(values, dim=-1)
                return joined.flatten(1) if names[0] in MAPS else joined
        raise UnsupportedError(
            f"{type(self.module).__name__} returns no output that is compared here ({', '.join(sum(OUTPUTS, ()))})"
        )

    def _drawn(self, shapes: tuple[Any, ...] | None, call: Callable[[], Any]) -> Any:
        """A forward pass, in which the model's own code draws the same random numbers each time: outputs of two models can
        be compared, and a conversion repeats. shapes: of the inputs, None where they do not say all, since some models draw
        for long texts alone (Reformer)."""
        if shapes in self._drawless:
            return call()
        with SameDraws() as draws:
            out = call()
        if shapes is not None and not draws.drew and len(self._drawless) < MOST_SHAPES:
            self._drawless.add(shapes)
        return out

    def try_outputs(self, hint: str, **inputs: Tensor) -> Tensor:
        """As `outputs`, of inputs that were made for the model. Raises UsageError where its own code fails on them: it may
        read images beside a text. hint: what to do."""
        try:
            return self.outputs(**inputs)
        except (NstfError, IndexError):  # tokens beyond a table are said by others
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            reason, kind = " ".join(str(error).split())[:200], type(self.module).__name__
            raise UsageError(
                f"{kind} does not run on {', '.join(inputs)} alone ({reason}): {hint}"
            ) from error

    def _decoder_inputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        config = self.module.config
        tokens = (getattr(config, f"{n}_token_id", None) for n in ("decoder_start", "bos", "pad"))
        start = next((t for t in tokens if isinstance(t, int)), 0)
        most = max(
            (m.num_embeddings for m in self.module.modules() if isinstance(m, nn.Embedding)), default=0
        )
        if most and not 0 <= start < most:
            raise UnsupportedError(
                f"the config's token {start}, with which answers begin, is beyond the model's vocabulary; "
                "take the config that belongs to the weights"
            )
        rows = next(iter(inputs.values())).shape[0]
        ids = inputs.get("input_ids")
        if ids is None:
            # A stride that is prime spreads a few tokens over any vocabulary.
            vocabulary = config.get_text_config(decoder=True).vocab_size
            ids = torch.arange(1, DECODER_TOKENS + 1, device=self.device) * 7919 % vocabulary
            ids = ids.expand(rows, -1)
        return torch.cat([torch.full((rows, 1), start, device=ids.device), ids[:, :-1]], dim=1)

    def linear_modules(self) -> Iterator[tuple[str, nn.Module, str]]:
        """(module path, module, stored weight name) of every module whose weight multiplies its input."""
        for path, module in self.module.named_modules():
            weight = f"{path}.weight"
            if weight in self._names and isinstance(module, LINEAR_TYPES + conv1d()):
                yield path, module, self._names[weight]

    def expert_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) of the modules that hold the three-dimensional weight stacks of experts."""
        for path, module in self.module.named_modules():
            if {"gate_up_proj", "down_proj"} <= set(dict(module.named_parameters(recurse=False))):
                yield path, module

    @contextmanager
    def holding(self, *modules: nn.Module | None) -> Iterator[None]:
        """Keeps the weights of these modules in memory while the block runs, for modules called many times. Several threads
        may hold one, if none calls it without."""
        held = [m for m in modules if m in self._fetchers]
        for module in held:
            self._fetchers[module][0]()
        with self._holding:
            self._held.update(held)
        try:
            yield
        finally:
            with self._holding:
                self._held.subtract(held)
            for module in held:
                self._fetchers[module][1]()

    def settle(self) -> None:
        """Fetches the small weights that stay loaded."""
        while self._pending:
            self._pending[-1]()
            self._pending.pop()

    def _fetch_buffers(self) -> None:
        """Buffers that the source has, in their own dtypes; floating-point ones in float32."""
        for name in self._buffers:
            owner, _, local = name.rpartition(".")
            buffers = self.module.get_submodule(owner)._buffers
            value = self._buffer(name)
            if value.shape != buffers[local].shape:
                raise CorruptError(
                    f"tensor {name!r} has shape {list(value.shape)}, the config asks for "
                    f"{list(buffers[local].shape)}: use the config.json that belongs to these weights"
                )
            own = buffers[local].dtype
            dtype = torch.float32 if own.is_floating_point else own
            buffers[local] = value.detach().to(self.device, dtype).clone()

    def _buffer(self, name: str) -> Tensor:
        return self.weights(name)

    def _stored_names(self) -> dict[str, str]:
        from nstf.runtime.skeleton import tied_aliases

        aliases = tied_aliases(self.module)
        names = {}
        for name, _ in self.module.named_parameters(remove_duplicate=False):
            stored = aliases.get(name, name)
            names[name] = self._ties.get(name) or self._ties.get(stored, stored)
        return names

    def _owners(self) -> Iterator[tuple[nn.Module, dict[str, str]]]:
        for path, module in self.module.named_modules():
            local = {
                n: self._names[f"{path}.{n}" if path else n]
                for n, p in module.named_parameters(recurse=False)
            }
            if local:
                yield module, local

    def _attach(self, module: nn.Module, names: dict[str, str]) -> None:
        shapes = {n: p.shape for n, p in module.named_parameters(recurse=False)}
        meta = dict(module.named_parameters(recurse=False))

        def fetch(local: str) -> nn.Parameter:
            value = self.weights(names[local])
            if value.shape != shapes[local]:
                raise CorruptError(
                    f"tensor {names[local]!r} has shape {list(value.shape)}, the config asks for "
                    f"{list(shapes[local])}: use the config.json that belongs to these weights"
                )
            return nn.Parameter(value.to(torch.float32), requires_grad=False)

        # Position tables are read by some parents without a call of the module itself (Whisper).
        table = isinstance(module, nn.Embedding) and module.num_embeddings <= RESIDENT_POSITIONS
        small = [n for n, s in shapes.items() if table or s.numel() * 4 <= RESIDENT_BYTES]
        large = [n for n in shapes if n not in small]

        def settle() -> None:
            for local in small:
                # A copy, since a view would keep the whole file it came from mapped.
                module._parameters[local] = nn.Parameter(fetch(local).clone(), requires_grad=False)

        self._pending.append(settle)
        if not large:
            return

        # Several threads may run the module at a time: the first loads the weights, the last drops them.
        lock = threading.Lock()
        users = 0

        def load() -> None:
            nonlocal users
            with lock:
                if users == 0:
                    for local in large:
                        module._parameters[local] = fetch(local)
                users += 1

        def drop() -> None:
            nonlocal users
            with lock:
                users = max(0, users - 1)
                if users == 0:
                    for local in large:
                        module._parameters[local] = meta[local]

        self._fetchers[module] = (load, drop)
        # On the meta device a weight would be taken for numbers: torch multiplies by whatever is in memory.
        for caller in {module, self._readers.get(module, module)}:
            caller.register_forward_pre_hook(lambda *_: None if self._held[module] else load())
            caller.register_forward_hook(lambda *_: None if self._held[module] else drop(), always_call=True)


def _is_ours(error: BaseException) -> bool:
    """Whether code of this package raised it, a hook's for one: no config is to blame."""
    names = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Functions of torch that the model calls pass through there.
    return [name for name in names if name != SameDraws.__module__][-1].startswith("nstf")

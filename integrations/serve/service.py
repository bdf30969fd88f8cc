"""From a checked request to a running answer, whichever backend decodes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nstf.errors import UnsupportedError, UsageError
from nstf.integrations.serve.errors import ApiError, too_long, wrong
from nstf.integrations.serve.grammar import Grammars
from nstf.integrations.serve.metrics import Metrics
from nstf.integrations.serve.output import Answer, Piece
from nstf.integrations.serve.prompts import Prompts
from nstf.integrations.serve.protocol import Request
from nstf.runtime.artifact import Artifact, open_artifact
from nstf.runtime.artifact.generation import check_generation
from nstf.runtime.token_sampler import WORDING, Wording

if TYPE_CHECKING:
    from nstf.integrations.serve.backend import Backend


@dataclass(frozen=True)
class ServeOptions:
    """parallel: answers decoded together; queue: answers that wait. context: tokens of prompt and answer.

    max_tokens: of one answer, None for as many as fit. reproducible: see runtime/engine_batch.py. device: as torch names it.
    template: a chat template in the place of the file's own. attention: full, or planned as the file's plan says.
    """

    name: str
    parallel: int = 8
    queue: int = 32
    context: int | None = None
    max_tokens: int | None = None
    threads: int | None = None
    kv_cache: str = "float16"
    exact: bool = False
    reproducible: bool = False
    prefix_reuse: bool = True
    device: str = "cpu"
    kernels: str | os.PathLike[str] | None = None
    template: str | None = None
    attention: str = "full"


def _characters(part: Any) -> int:
    """Characters of a message or of a prompt, or the tokens of one."""
    if isinstance(part, dict):
        content = part.get("content")
        return len(content) if isinstance(content, str) else 0
    return len(part)


def _wording(artifact: Artifact, vocab: int) -> Wording:
    """What the file's own settings let no text contain. Raises CorruptError for values of another form."""
    source = "generation_config.json"
    stated = artifact.object(source) if source in artifact.file_names() else {}
    return Wording.of(
        check_generation({k: v for k, v in stated.items() if k in WORDING}, artifact.where), vocab
    )


class Service:
    """An artifact that answers requests."""

    def __init__(self, path: str | os.PathLike[str], options: ServeOptions) -> None:
        """Raises CorruptError for a damaged file, UnsupportedError for one that generates no text, UsageError."""
        self.options = options
        self.metrics = Metrics()
        self.note: str | None = None  # why the engine does not run the model
        with open_artifact(path) as artifact:
            self.prompts = Prompts(artifact, options.template)
            self.backend: Backend = self._backend(artifact)
        self.context = min(self.backend.context, options.context or self.backend.context)
        fast = self.prompts.fast
        words = sum(len(word.encode("utf-8", "replace")) for word in fast.get_vocab())
        self._grammars = Grammars(fast.to_str(), self.backend.vocab, sorted(self.prompts.turn_ends), words)

    def _backend(self, artifact: Artifact) -> Backend:
        """The engine on a CPU, the captured decoder on a GPU; transformers where neither runs the model."""
        from nstf.integrations.serve.scheduler import Scheduler

        o = self.options
        if o.device == "cpu":
            from nstf.runtime.engine import Engine
            from nstf.runtime.engine_batch import Batch

            try:
                engine = Engine.open(artifact.path, o.exact, kv_cache=o.kv_cache, attention=o.attention)
            except UnsupportedError as error:
                self.note = str(error)
            else:
                if o.reproducible and engine.plan is not None:
                    raise UsageError(
                        "`reproducible` needs full attention: which blocks a plan skips depends on how prompts are cut"
                    )
                engine.threads = o.threads
                batch = Batch(engine, o.parallel, o.reproducible)
                return Scheduler(
                    "CPU engine", batch, o.parallel, o.queue, self.metrics, o.reproducible, o.prefix_reuse,
                    _wording(artifact, batch.vocab),
                )  # fmt: skip
        self._only_the_engine()
        import torch

        from nstf.runtime import token_sampler
        from nstf.runtime.graph_batch import GraphBatch
        from nstf.runtime.graph_decoder import Decoder
        from nstf.runtime.loading import load

        if o.threads is not None:
            torch.set_num_threads(o.threads)
        model: Any = load(
            artifact.path,
            device=o.device,
            attention=o.attention,
            engine="exact" if o.exact else "auto",
            kernels=o.kernels,
        )
        try:
            if not token_sampler.available():
                raise UnsupportedError(
                    "without the compiled extension, which chooses tokens, nothing is decoded together"
                )
            if o.attention == "planned":
                raise UnsupportedError(
                    "several answers together attend in full; with a plan they run one at a time"
                )
            steps = GraphBatch(Decoder(model), o.parallel)
        except UnsupportedError as error:
            self.note = self.note or str(error)
        else:
            name = "captured decoder" if o.device != "cpu" else "decoder without graphs"
            wording = _wording(artifact, steps.vocab)
            return Scheduler(name, steps, o.parallel, o.queue, self.metrics, False, o.prefix_reuse, wording)
        from nstf.integrations.serve.modules import ModulesBackend

        try:
            sample = self.prompts.text("Good morning to all of you.")
        except ApiError:
            sample = []  # whoever sends such a text is told
        return ModulesBackend(model, o.queue, self.metrics, sample)

    def _only_the_engine(self) -> None:
        """Raises UsageError for options that nothing but the CPU engine has."""
        o = self.options
        given = {"`reproducible`": o.reproducible, "`kv_cache` int8": o.kv_cache != "float16"}
        for option, stated in given.items():
            if stated:
                raise UsageError(
                    f"{option} is for models that the CPU engine runs"
                    + (f": {self.note}" if self.note else "")
                )

    def begin(self, request: Request, emit: Callable[[Piece], None]) -> Answer:
        """Tokenises a request and puts it into the queue. emit: gets pieces, from another thread. Raises ApiError."""
        self.backend.check_room()  # before any work: a full queue is said at once
        longest = self.prompts.longest_token * self.context
        parts: Sequence[Any] = request.messages if request.messages is not None else [request.prompt]
        if sum(_characters(part) for part in parts) > longest:
            raise too_long("prompt" if request.messages is None else "messages", self.context)
        if request.messages is not None:
            prompt, ends, field = (
                self.prompts.chat(request.messages, self.context),
                self.prompts.turn_ends,
                "messages",
            )
        elif isinstance(request.prompt, str):
            prompt, ends, field = self.prompts.text(request.prompt), self.prompts.ends, "prompt"
        else:
            prompt, ends, field = request.prompt, self.prompts.ends, "prompt"
        if not prompt:
            raise wrong(field, "the prompt has no tokens; give some text")
        if min(prompt) < 0 or max(prompt) >= self.backend.vocab:
            raise wrong(field, f"a token is outside the vocabulary of {self.backend.vocab}")
        room = self.context - len(prompt)
        if room < 1 or (request.most or 1) > room:
            asked = f"the prompt has {len(prompt)} tokens" + (
                f" and max_tokens is {request.most}" if request.most and room >= 1 else ""
            )
            raise wrong(
                field, f"{asked}; this server's context is {self.context} tokens", "context_length_exceeded"
            )
        limit = self.options.max_tokens
        if limit is not None and (request.most or 1) > limit:
            raise wrong("max_tokens", f"max_tokens is {request.most}; this server allows {limit}")
        grammar = None if request.schema is None else self._grammars.of(request.schema)
        if grammar is not None:
            ends = self.prompts.turn_ends  # those that the grammar allows at its end
        most = min(n for n in (room, limit, self.backend.usual_most) if n is not None)
        answer = Answer(
            prompt, request.most or most, request.settings, ends, request.stops, self.prompts.fast, emit,
            request.logprobs, grammar,
        )  # fmt: skip
        self.backend.submit(answer)
        return answer

    def close(self) -> None:
        """Ends what is running."""
        self.backend.close()

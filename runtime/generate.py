"""Text from a loaded model, piece by piece: what `nstf generate` prints."""

import logging
from collections.abc import Iterator, Sequence
from queue import Queue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from nstf.errors import NstfError, UnsupportedError, UsageError, no_row, out_of_memory
from nstf.runtime.stops import StopText
from nstf.runtime.token_sampler import Settings
from nstf.runtime.tokenizing import Decoder, apply_template, check_length, encode
from nstf.runtime.torch_state import usual_thread

_log = logging.getLogger("nstf")


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    chat: bool = False,
    seed: int = 0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stops: Sequence[str] = (),
) -> Iterator[str]:
    """The generated text in pieces, as soon as each is certain (whole words or characters).

    temperature: 0 always takes the likeliest token; above 0 samples, reproducibly by `seed`.
    chat: the prompt is a user's message and goes through the tokenizer's chat template.
    top_k, top_p, min_p, repetition_penalty: as in transformers; None for the model's own. stops: strings that the text ends
    before. A caller who takes no more pieces and closes the iterator ends the generation, except of a model divided over
    processes: its ranks must take the same number of steps, so they go on to the end and the rest is dropped.

    Raises UsageError for a prompt that is empty or far too long, or values out of range, UnsupportedError for a model that
    generates no text. An error inside the model is raised here, after the pieces that came before it: as UsageError where
    the text is longer than the model's context, which some models run nonetheless, as UnsupportedError where transformers
    cannot run the model as the config of its file has it.
    """
    if max_new_tokens < 1 or temperature < 0:
        raise UsageError(
            f"max_new_tokens is {max_new_tokens} and temperature {temperature}; they must be at least 1 and 0"
        )
    if not -(1 << 63) <= seed < 1 << 64:
        raise UsageError(f"seed is {seed}; it must fit 64 bits")
    if not all(stops):
        raise UsageError("a stop string is empty: give the text to end before")
    temperature = Settings(
        temperature,
        top_k or 0,
        1.0 if top_p is None else top_p,
        min_p or 0.0,
        1.0 if repetition_penalty is None else repetition_penalty,
    ).temperature  # checked, and 0 where it is so near that logits would have no bounds
    check_writes_text(model)
    with usual_thread():  # a tokenizer makes its ids on the process's default device
        inputs = _inputs(tokenizer, prompt, chat, stated_context(model)).to(model.device)
    _warn_beyond_context(model, inputs.shape[-1], max_new_tokens)
    streamer = _streamer(tokenizer, stops)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    drawn = (
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        if temperature > 0
        else {}
    )
    stated = {**drawn, "repetition_penalty": repetition_penalty}
    options |= {k: v for k, v in stated.items() if v is not None}
    for name in ("num_beams", "num_return_sequences"):
        if (getattr(model.generation_config, name, None) or 1) > 1:
            _log.warning("the model's generation settings say %s: a text in pieces is decoded without", name)
            options[name] = 1
    if model.generation_config.pad_token_id is None:
        options["pad_token_id"] = _pad_token(model, tokenizer)
    failure: Queue[BaseException] = Queue()

    def work() -> None:
        try:
            try:
                with torch.inference_mode(), torch.random.fork_rng():
                    torch.manual_seed(seed)
                    model.generate(
                        inputs, attention_mask=torch.ones_like(inputs), streamer=streamer, **options
                    )
            except _Left:
                streamer.end()
        except BaseException as error:
            failure.put(error)
            streamer.abandon()

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield from (piece for piece in streamer if piece)
    finally:
        # When a caller leaves differs from process to process; a rank that stopped by it would leave the others waiting.
        streamer.left = getattr(model, "nstf_ranks", None) is None
        thread.join()
    if not failure.empty():
        error = failure.get()
        if isinstance(error, RuntimeError) and "probability tensor" in str(error):
            raise NstfError(f"no token can be drawn: the model computes no numbers ({error})") from error
        if (blamed := too_long(error, model, inputs.shape[-1], streamer.tokens)) is not None:
            raise blamed from error
        if (said := of_the_model(error, model)) is not error:
            raise said from error
        raise error


def check_writes_text(model: Any) -> None:
    """Raises UnsupportedError for a model that writes no text after a text: one that generates nothing, hears or sees
    instead of reading, or writes codes of sound side by side."""
    kind = type(model).__name__
    if not getattr(model, "can_generate", lambda: False)():
        raise UnsupportedError(f"{kind} does not generate text")
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids":
        raise UnsupportedError(
            f"{kind} does not continue a text: it reads {reads}; give them to `generate` of a model that "
            "nstf.runtime.load loads"
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES as SPEAKERS

    # By the names of their classes: some that write text do not say which module scores its tokens.
    if any(base.__name__ in SPEAKERS.values() for base in type(model).__mro__):
        raise UnsupportedError(f"{kind} does not generate text: it writes spectrograms of speech")
    if isinstance(getattr(model, "get_output_embeddings", lambda: None)(), torch.nn.ModuleList):
        raise UnsupportedError(f"{kind} does not generate text: each step writes several codes of a sound")


# How configs name the tokens that a text, or a prompt, may have: most; LED; MPT.
_CONTEXTS = ("max_position_embeddings", "max_encoder_position_embeddings", "max_seq_len")
# Positions that are no token's in some models: XLM puts the token that it looks for behind a text, and those of ProphetNet
# begin after its padding's, too.
_TAKEN = 2


def stated_context(model: Any) -> int | None:
    """Tokens of a model's text, or of an encoder-decoder's prompt, where it states them."""
    config: Any = getattr(model, "config", None)
    text = None
    if answers_apart(config):
        text = getattr(config, "encoder", None) or getattr(config, "text_encoder", None)
    if text is None and hasattr(config, "get_text_config"):
        try:
            text = config.get_text_config()
        except ValueError:  # of several parts
            return None
    found = (getattr(text, name, None) for name in _CONTEXTS)
    # XLNet states -1: it has no limit.
    return next((n for n in found if isinstance(n, int) and n > 0), None)


def answers_apart(config: Any) -> bool:
    """Whether prompt and answer have positions of their own."""
    return bool(getattr(config, "is_encoder_decoder", False))


def _warn_beyond_context(model: Any, prompt_tokens: int, new_tokens: int) -> None:
    """One line where a text would be longer than the model's context: what follows it is seldom text."""
    context = None if answers_apart(getattr(model, "config", None)) else stated_context(model)
    if context is not None and prompt_tokens + new_tokens > context:
        _log.warning(
            "%d tokens of prompt and %d new ones are more than the model's %d positions: beyond them it may be no text",
            prompt_tokens, new_tokens, context,
        )  # fmt: skip


def _answer_context(model: Any) -> int | None:
    """Tokens of an encoder-decoder's answer, where it states them apart from its prompt's (LED)."""
    config = getattr(model, "config", None)
    own = getattr(config, "decoder", None)
    found = getattr(config if own is None else own, "max_decoder_position_embeddings", None)
    if found is None and own is not None:
        found = getattr(own, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else stated_context(model)


def too_long(error: BaseException, model: Any, prompt_tokens: int, tokens: int) -> UsageError | None:
    """What to say where a model failed at a token beyond its context; None for errors of ours and where memory ended.

    tokens: those of the text so far, the prompt's included unless the answer has positions of its own.
    """
    memory = out_of_memory(error) or isinstance(error, torch.OutOfMemoryError)
    if memory or isinstance(error, NstfError) or not isinstance(error, Exception):
        return None
    apart = answers_apart(getattr(model, "config", None))
    context, whole = stated_context(model), _answer_context(model) if apart else stated_context(model)
    # Before its first new token a model can only have failed at the prompt.
    began = apart or tokens > prompt_tokens
    if whole is not None and began and tokens + _TAKEN > whole and (apart or prompt_tokens <= whole):
        return UsageError(
            f"the text has {tokens} tokens, and the model's context is {whole}: ask for fewer new ones"
        )
    if context is not None and prompt_tokens + _TAKEN > context:
        return UsageError(
            f"the prompt has {prompt_tokens} tokens, and the model's context is {context}: shorten it"
        )
    return None


def of_the_model(error: BaseException, model: Any) -> BaseException:
    """What to say where transformers cannot run a model that it could build: parts of its config contradict each other, or
    it names no token to begin an answer with. Errors of ours, of memory and of the system as they are, of a token beyond the
    vocabulary, where the tokenizer is to blame, and those of a rank, which may follow from another rank's end."""
    kept = isinstance(error, (NstfError, OSError, MemoryError, torch.OutOfMemoryError)) or no_row(error)
    if kept or not isinstance(error, Exception) or out_of_memory(error):
        return error
    if getattr(model, "nstf_ranks", None) is not None:
        return error
    reason = " ".join(str(error).split())[:300]
    return UnsupportedError(
        f"{type(model).__name__} cannot run as the config of its file has it ({type(error).__name__}: {reason}); "
        "convert it again with the config that belongs to its weights"
    )


class _Left(Exception):
    """Leaves `generate` between two tokens: a stop string came, or nobody takes its text."""


def _streamer(tokenizer: Any, stops: Sequence[str]) -> Any:
    """transformers' streamer, which counts tokens and ends the generation at a stop string, or once its `left` is set.

    Stop strings are found in the generating thread: ranks of a divided model see the same tokens and stop at the same one.
    """
    from transformers import TextIteratorStreamer

    cut = StopText(stops)

    class Streamer(TextIteratorStreamer):  # type: ignore[misc]
        left = False
        tokens = 0

        def put(self, value: Tensor) -> None:
            if self.left:
                raise _Left
            self.tokens += value.numel()
            super().put(value)

        def abandon(self) -> None:
            """Ends the text after an error, which the caller is told: perhaps of decoding itself, which then fails again
            here, and the caller would wait for ever."""
            try:
                self.end()
            except BaseException:
                self.text_queue.put(self.stop_signal)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            certain = cut.feed(text)
            super().on_finalized_text(certain + cut.rest() if stream_end else certain, stream_end)
            if cut.ended and not stream_end:
                raise _Left

    return Streamer(Decoder(tokenizer), skip_prompt=True, skip_special_tokens=True)


def _inputs(tokenizer: Any, prompt: str, chat: bool, context: int | None) -> Tensor:
    """Token ids [1, tokens]."""
    library = getattr(tokenizer, "backend_tokenizer", None)
    if context is not None and library is not None:
        check_length(prompt, context, library.get_vocab)
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError("this tokenizer has no chat template: give it a plain text")
        message = [{"role": "user", "content": prompt}]
        text = apply_template(tokenizer, message)
        if context is not None and library is not None:
            check_length(text, context, library.get_vocab)  # a template may write more than it is given
        ids: Tensor = encode(tokenizer, text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    else:
        ids = encode(tokenizer, prompt, return_tensors="pt")["input_ids"]
    if ids.numel() == 0:
        raise UsageError("the prompt has no tokens; give a text to continue")
    return ids.to(torch.int64)


def _pad_token(model: Any, tokenizer: Any) -> int:
    """Nothing is padded in a batch of one; generate() only wants some id, and warns without."""
    end = model.generation_config.eos_token_id
    end = end[0] if isinstance(end, list) and end else end
    found = end if isinstance(end, int) else getattr(tokenizer, "eos_token_id", None)
    return int(found) if isinstance(found, int) else 0

"""`nstf generate`: streams text from an artifact."""

import sys
import time
from typing import Annotated, Any

import typer

from nstf.errors import UsageError
from nstf_convert.cli import options
from nstf_convert.cli.inspect import ArtifactPath
from nstf_convert.cli.output import print_json


def generate(
    artifact: ArtifactPath,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=10.0, help="0 takes the most likely token; higher is more varied.")
    ] = 0.0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")
    ] = False,
    seed: options.Seed = 0,
    attention: Annotated[
        str, typer.Option(help="dense, or planned: as the artifact's attention plan says.")
    ] = "dense",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 and so on (ROCm is called cuda).")] = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Generate text with an artifact.

    Example: nstf generate model.nstf "The capital of France is" --max-new-tokens 20
    """
    options.check_file(artifact)
    if attention not in ("dense", "planned"):
        raise UsageError(f"--attention {attention!r}: choose dense or planned")
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise UsageError("the prompt is empty: give some text to continue")
    import torch

    import nstf.runtime

    if threads is not None:
        torch.set_num_threads(threads)
    tokenizer = nstf.runtime.load_tokenizer(artifact)
    keywords: dict[str, Any] = {"attention": attention} if attention == "planned" else {}
    model: Any = nstf.runtime.load(artifact, device=device, **keywords)
    if not hasattr(model, "generate"):
        raise UsageError(f"{artifact} is not a language model: it has no text to generate")
    inputs = encode(tokenizer, text, chat).to(device)
    torch.manual_seed(seed)
    start = time.monotonic()
    with torch.inference_mode():
        output = model.generate(**inputs, **sampling(temperature, max_new_tokens, tokenizer),
                                streamer=None if json else streamer(tokenizer))  # fmt: skip
    seconds = time.monotonic() - start
    new = output[0, inputs["input_ids"].shape[1] :]
    if json:
        print_json({"prompt": text, "text": tokenizer.decode(new, skip_special_tokens=True), "tokens": len(new),
                    "seconds": seconds, "tokens_per_second": len(new) / max(seconds, 1e-9)})  # fmt: skip


def encode(tokenizer: Any, text: str, chat: bool) -> Any:
    """The model's inputs. Raises UsageError for --chat without a template."""
    if not chat:
        return tokenizer(text, return_tensors="pt")
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("this model has no chat template: leave --chat out")
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def sampling(temperature: float, max_new_tokens: int, tokenizer: Any) -> dict[str, Any]:
    """Keywords of `generate`."""
    options = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    if getattr(tokenizer, "pad_token_id", None) is None and tokenizer.eos_token_id is not None:
        options["pad_token_id"] = tokenizer.eos_token_id
    return options


def streamer(tokenizer: Any) -> Any:
    """Prints tokens on stdout as they come."""
    from transformers import TextStreamer

    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

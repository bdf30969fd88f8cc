"""Training of the two sample language models: texts, tokenizer, loop, measurement. Used by `tiny_*/train.py`.

A model of 2 to 3 million parameters sees 1.2 MB of text about eighty times, so most of this file keeps
it from learning the text by heart: the tokenizer's merges are dropped at random each time the text is
read (BPE-dropout, Provilkov 2020), the outputs of attention and feed-forward blocks are dropped out, and
the best checkpoint on a validation part is kept.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

DATA = Path(__file__).parent / "data"
DOCUMENT_BREAK = "\n\n\n"
END = "<|endoftext|>"
VOCABULARY = 1000


@dataclass(frozen=True)
class Settings:
    """How to train. `context` in tokens; `learning_rate` is the peak after the warm-up."""

    steps: int
    batch: int
    context: int
    learning_rate: float
    dropout: float
    device: str
    seed: int
    out: Path

    @staticmethod
    def from_arguments(description: str, out: Path, steps: int, dropout: float) -> "Settings":
        """The command line both scripts share; the defaults suit a GPU (two cores: see the scripts)."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--steps", type=int, default=steps)
        parser.add_argument("--batch", type=int, default=32, help="sequences a step")
        parser.add_argument("--context", type=int, default=512, help="tokens a sequence")
        parser.add_argument("--learning-rate", type=float, default=2e-3)
        parser.add_argument("--dropout", type=float, default=dropout)
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--out", type=Path, default=out)
        return Settings(**vars(parser.parse_args()))


def documents(*names: str) -> list[str]:
    """The documents (chapters, addresses) of the named files in `data/`."""
    return [d for name in names for d in (DATA / name).read_text("utf-8").split(DOCUMENT_BREAK)]


def train_tokenizer(texts: list[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE tokenizer: every string can be encoded and decoding gives it back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All documents as one row of tokens, each begun by the end-of-text token. int64 [tokens]."""
    end = tokenizer.token_to_id(END)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.append(end)
        ids.extend(encoding.ids)
    return torch.tensor(ids)


def noisy_copy(tokenizer: Tokenizer, merge_dropout: float) -> Tokenizer:
    """The same tokenizer, leaving out each merge with probability `merge_dropout` while encoding."""
    state = json.loads(tokenizer.to_str())
    state["model"]["dropout"] = merge_dropout
    return Tokenizer.from_str(json.dumps(state))


def batches(
    tokenizer: Tokenizer, texts: list[str], settings: Settings, generator: torch.Generator
) -> Iterator[Tensor]:
    """Random windows for ever, int64 [batch, context + 1]; the text is tokenized anew after each pass."""
    noisy = noisy_copy(tokenizer, merge_dropout=0.05)
    span = torch.arange(settings.context + 1)
    while True:
        ids = encode_documents(noisy, texts)
        for _ in range(max(1, len(ids) // (settings.batch * settings.context))):
            starts = torch.randint(len(ids) - settings.context - 1, (settings.batch, 1), generator=generator)
            yield ids[starts + span]


@torch.no_grad()
def mean_loss(model: nn.Module, ids: Tensor, context: int, device: str) -> float:
    """Mean cross-entropy in nats per token over non-overlapping windows of `context` tokens."""
    model.eval()
    rows = (len(ids) - 1) // context
    inputs = ids[: rows * context].view(rows, context)
    targets = ids[1 : rows * context + 1].view(rows, context)
    total = 0.0
    for x, y in zip(inputs.split(32), targets.split(32), strict=True):
        logits = model(input_ids=x.to(device)).logits.float()
        total += nn.functional.cross_entropy(
            logits.flatten(0, 1), y.to(device).flatten(), reduction="sum"
        ).item()
    return total / (rows * context)


def add_dropout(
    model: nn.Module, suffixes: tuple[str, ...], p: float
) -> list[torch.utils.hooks.RemovableHandle]:
    """Drops out what the named blocks add to the residual stream, while training only."""

    def hook(
        module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, tuple):
            return nn.functional.dropout(output[0], p, module.training), *output[1:]
        return nn.functional.dropout(output, p, module.training)

    return [m.register_forward_hook(hook) for n, m in model.named_modules() if n.endswith(suffixes)]


def learning_rate_scale(step: int, steps: int) -> float:
    """Linear warm-up over the first 4 %, then a cosine to 2 % of the peak."""
    warm = max(1, steps // 25)
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(model: PreTrainedModel, tokenizer: Tokenizer, settings: Settings) -> None:
    """Trains in place and leaves the weights that were best on the validation part (the last twentieth)."""
    texts = documents("prose.txt", "speeches.txt")
    generator = torch.Generator().manual_seed(settings.seed)
    validation = texts[::20]
    texts = [t for i, t in enumerate(texts) if i % 20]
    validation_ids = encode_documents(tokenizer, validation)
    model.to(settings.device)
    handles = add_dropout(model, ("self_attn", "mlp", "embed_tokens"), settings.dropout)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: learning_rate_scale(s, settings.steps))
    best, best_state = math.inf, {}
    started = time.monotonic()
    every = max(1, min(100, settings.steps // 10))
    for step, batch in enumerate(batches(tokenizer, texts, settings, generator)):
        if step % every == 0 or step == settings.steps:
            loss = mean_loss(model, validation_ids, settings.context, settings.device)
            if loss < best:
                best = loss
                best_state = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
            print(
                f"step {step}: validation {loss:.4f} nats/token, {time.monotonic() - started:.0f} s",
                flush=True,
            )
        if step == settings.steps:
            break
        model.train()
        batch = batch.to(settings.device)
        with torch.autocast(settings.device.split(":")[0], torch.bfloat16, enabled=settings.device != "cpu"):
            output = model(input_ids=batch[:, :-1])
        loss = nn.functional.cross_entropy(output.logits.float().flatten(0, 1), batch[:, 1:].flatten())
        if getattr(output, "aux_loss", None) is not None:  # experts are to share the load
            loss = loss + model.config.router_aux_loss_coef * output.aux_loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    for handle in handles:
        handle.remove()
    model.load_state_dict(best_state)


def save(model: PreTrainedModel, tokenizer: Tokenizer, settings: Settings) -> None:
    """Writes the model in bfloat16 with its tokenizer, and prints what it can do with the rounded weights."""
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False  # wanted in training only
    model.to(torch.bfloat16).save_pretrained(settings.out)
    (settings.out / "model.safetensors").chmod(0o644)
    end = tokenizer.token_to_id(END)
    GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end).save_pretrained(settings.out)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(settings.out)
    model.float().eval()  # the same values, measured in float32
    texts = documents("heldout.txt")
    ids = encode_documents(tokenizer, texts)
    loss = mean_loss(model, ids, settings.context, settings.device)
    bits_per_byte = loss * len(ids) / sum(len(t.encode()) for t in texts) / math.log(2)
    print(
        f"heldout.txt: perplexity {math.exp(loss):.2f}, {bits_per_byte:.3f} bits per byte, {len(ids)} tokens"
    )
    torch.manual_seed(settings.seed)
    for prompt in ("The captain looked", "Fellow-Citizens of the Senate"):
        inputs = wrapped(prompt, return_tensors="pt").to(settings.device)
        sampled = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=60,
            do_sample=True,
            temperature=0.7,
            top_k=40,
        )
        print("  " + wrapped.decode(sampled[0], skip_special_tokens=True).replace("\n", " "))


def run(model: PreTrainedModel, settings: Settings) -> None:
    """Tokenizer, training, saving."""
    tokenizer = train_tokenizer(documents("prose.txt", "speeches.txt"))
    count = sum(p.numel() for p in model.parameters())
    print(f"{type(model).__name__}: {count} parameters, vocabulary {tokenizer.get_vocab_size()}", flush=True)
    train(model, tokenizer, settings)
    save(model, tokenizer, settings)

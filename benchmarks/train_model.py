"""A small language model whose rows are multiples of 256, trained from scratch on text that every machine has.

    python benchmarks/train_model.py corpus FOLDER              # text, held-out text and a tokenizer; minutes on a CPU
    python benchmarks/train_model.py train FOLDER OUT --minutes 6   # minutes on a GPU
    python benchmarks/train_model.py train FOLDER OUT --minutes 0.8 --experts 8 --ffn 1024 --batch 32 --no-compile

llama.cpp's k- and i-quants work in blocks of 256 weights of a row, so a fair comparison needs a model whose rows are
multiples of 256. The text is the prose (docstrings, .md, .rst, .txt) and the Python source of the packages installed
beside this interpreter and of the standard library. Files are held out by a hash of their path, whole: FOLDER gets
`heldout_prose.txt`, `heldout_code.txt`, `calibration.txt` (text that was trained on), `train.txt.xz` and
`tokenizer.json` (byte-level BPE). OUT gets a Hugging Face folder: Llama, or with --experts Qwen3-MoE (105 million
parameters in the last line), tied table, bfloat16, in shards. With --upcycle a part of the time trains a dense model whose
MLP all experts then start from (Komatsuzaki et al. 2022), as some published mixtures were made.
"""

import argparse
import ast
import hashlib
import json
import lzma
import math
import random
import sysconfig
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SEPARATOR = "\0"
END_OF_TEXT = "<|endoftext|>"
# One file of HELD_OUT is held out.
HELD_OUT = 40
HELD_OUT_CHARS = 400_000
PIECE_CHARS = 6_000
FILE_CHARS = (400, 300_000)
SHARD_BYTES = 15 << 20
# Weight of the loss that keeps experts equally busy.
BALANCE = 0.01


def documents(root: Path) -> Iterator[tuple[str, str, str]]:
    """(domain, path, text) of every readable text below `root`; a .py file gives its code and its prose."""
    for path in sorted(root.rglob("*")):
        if path.suffix not in (".py", ".md", ".rst", ".txt") or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        name = str(path.relative_to(root))
        if not FILE_CHARS[0] <= len(text) <= FILE_CHARS[1] or SEPARATOR in text or not _is_written(text):
            continue
        if path.suffix == ".py":
            yield "code", name, text
            if len(prose := "\n\n".join(_docstrings(text))) >= FILE_CHARS[0]:
                yield "prose", name, prose
        else:
            yield "prose", name, text


def _is_written(text: str) -> bool:
    """False for tables of data: very long lines, or mostly digits and foreign letters."""
    letters = sum(c.isascii() and c.isalpha() for c in text)
    return len(text) / (text.count("\n") + 1) < 160 and letters > 0.4 * len(text)


def _docstrings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found and len(found) > 100:
                yield found


def build_corpus(folder: Path, limit_chars: int) -> None:
    """Writes the corpus, the held-out texts, the calibration text and the tokenizer into `folder`."""
    seen: set[str] = set()
    train: dict[str, list[str]] = {"prose": [], "code": []}
    held: dict[str, list[str]] = {"prose": [], "code": []}
    for root in (Path(sysconfig.get_paths()["purelib"]), Path(sysconfig.get_paths()["stdlib"])):
        for domain, name, text in documents(root):
            if root.name.startswith("python") and "site-packages" in name:
                continue
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest in seen:
                continue
            seen.add(digest)
            path_hash = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
            (held if path_hash % HELD_OUT == 0 else train)[domain].append(text)
    generator = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for domain, texts in held.items():
        generator.shuffle(texts)
        pieces = "\n\n".join(text[:PIECE_CHARS] for text in texts)
        (folder / f"heldout_{domain}.txt").write_text(pieces[:HELD_OUT_CHARS], encoding="utf-8")
    for texts in train.values():
        generator.shuffle(texts)
    # Alternating pieces of both domains, so that any prefix of the calibration text is a mix.
    pairs = zip(train["prose"], train["code"], strict=False)
    pieces = "\n\n".join(t[:PIECE_CHARS] for pair in pairs for t in pair)
    (folder / "calibration.txt").write_text(pieces[:1_500_000], encoding="utf-8")
    kept = train["prose"] + train["code"]
    generator.shuffle(kept)
    total = 0
    with lzma.open(folder / "train.txt.xz", "wt", encoding="utf-8", preset=1) as file:
        for text in kept:
            file.write(text + SEPARATOR)
            total += len(text)
            if total > limit_chars:
                break
    chars = {d: sum(map(len, t)) for d, t in train.items()}
    print(f"{chars} characters found, {total} kept, {(folder / 'train.txt.xz').stat().st_size} bytes packed")
    train_tokenizer(kept, folder, generator)


def train_tokenizer(texts: list[str], folder: Path, generator: random.Random, vocabulary: int = 8192) -> None:
    """A byte-level BPE tokenizer on a sample of the texts, as tokenizer.json and tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(generator.sample(texts, min(len(texts), 2500)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": END_OF_TEXT,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tokens_of(folder: Path, limit_chars: int | None = None) -> torch.Tensor:
    """All training text as one stream of token ids, int32, with an end-of-text token after every document."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with lzma.open(folder / "train.txt.xz", "rt", encoding="utf-8") as file:
        texts = file.read(-1 if limit_chars is None else limit_chars).split(SEPARATOR)
    ids: list[torch.Tensor] = []
    for start in range(0, len(texts), 1024):
        for encoded in tokenizer.encode_batch(texts[start : start + 1024]):
            ids.append(torch.tensor([*encoded.ids, 0], dtype=torch.int32))
    return torch.cat(ids)


def train(args: argparse.Namespace) -> None:
    """Trains for `args.minutes` (or `args.steps`), prints the held-out perplexities and writes the model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.monotonic()
    data = tokens_of(args.folder, args.chars).to(device)
    print(f"{data.numel()} tokens after {time.monotonic() - start:.0f} s, on {device}", flush=True)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    first = args.upcycle if args.experts else 0.0
    if first:
        model = new_model(args, 1).to(device)
        fit(model, data, args, first)
        model = upcycled(model, new_model(args, args.experts).to(device))
    else:
        model = new_model(args, args.experts).to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    fit(model, data, args, 1.0 - first)
    for module in model.modules():
        module.__dict__.pop("forward", None)  # the model's own from here on
    save(model.to("cpu", torch.bfloat16), args.folder, args.out)
    held_out(model.to(device), args.folder, device)


def new_model(args: argparse.Namespace, experts: int) -> Any:
    """A Llama, or a Qwen3-MoE of so many experts, of which a token takes `args.top`."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    given = {
        "vocab_size": 8192, "hidden_size": args.hidden, "intermediate_size": args.ffn, "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 64, "num_key_value_heads": max(1, args.hidden // 128), "head_dim": 64,
        "max_position_embeddings": 1024, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
        "initializer_range": 0.02, "use_cache": False,
    }  # fmt: skip
    if not experts:
        return LlamaForCausalLM(LlamaConfig(**given))
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **given, moe_intermediate_size=args.ffn, num_experts=experts, num_experts_per_tok=min(args.top, experts),
            norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1,
        )
    )  # fmt: skip
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(sorted_experts, layer.mlp)
    return model


def sorted_experts(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What transformers' sparse block gives: tokens sorted by expert, two products an expert. Leaves in `block.balance` the
    loss that keeps experts equally busy (Fedus et al. 2021).

    hidden: [batch, tokens, hidden].
    """
    flat, stacks = hidden.flatten(0, 1), block.experts
    logits, weights, chosen = block.gate(flat)
    choices, order = chosen.flatten().sort(stable=True)
    counts = torch.bincount(choices, minlength=logits.shape[1])
    busy = counts / len(flat)
    block.balance = len(busy) * (busy * logits.float().softmax(-1).mean(0)).sum() / chosen.shape[1]
    token = order // chosen.shape[1]
    parts = []
    matrices = zip(stacks.gate_up_proj.unbind(), stacks.down_proj.unbind(), strict=True)
    for x, (gate_up, down) in zip(flat[token].split(counts.tolist()), matrices, strict=True):
        gate, up = torch.nn.functional.linear(x, gate_up).chunk(2, dim=-1)
        parts.append(torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down))
    weighted = torch.cat(parts) * weights.flatten()[order, None].to(parts[0].dtype)
    return torch.zeros_like(weighted[:1]).expand(len(flat), -1).index_add(0, token, weighted).view_as(hidden)


def upcycled(dense: Any, model: Any) -> Any:
    """`model` with the values of one of a single expert: every expert its copy, the router new."""
    own = dense.state_dict()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if not name.endswith("mlp.gate.weight"):
                value.copy_(own[name].expand_as(value))
    return model


def fit(model: Any, data: torch.Tensor, args: argparse.Namespace, share: float) -> None:
    """Trains a model for a share of the time or steps: AdamW, a warm-up, a cosine to zero."""
    device = data.device.type
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.rate, betas=(0.9, 0.95), fused=device == "cuda",
    )  # fmt: skip
    blocks = [layer.mlp for layer in model.model.layers] if args.experts else []

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        return loss + BALANCE * sum(b.balance for b in blocks)

    compiled = device == "cuda" and not args.no_compile
    step_loss = torch.compile(loss_of) if compiled else loss_of
    budget, steps = 60 * args.minutes * share, round(args.steps * share) if args.steps else None
    offsets = torch.arange(args.context, device=device)
    step, began = 0, time.monotonic()
    while True:
        elapsed = time.monotonic() - began
        done = step / steps if steps else elapsed / budget
        if done >= 1:
            break
        rate = args.rate * min(1.0, (step + 1) / args.warmup) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        first = torch.randint(data.numel() - args.context, (args.batch, 1), device=device)
        loss = step_loss(data[first + offsets].long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0 or step < 3:
            print(f"step {step}, {elapsed:.0f} s, rate {rate:.2e}, loss {loss.item():.4f}", flush=True)
        step += 1
    print(f"{step} steps of {args.batch * args.context} tokens", flush=True)


def held_out(model: torch.nn.Module, folder: Path, device: str) -> None:
    """Prints the perplexity on 32 windows of each held-out text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for domain in ("prose", "code"):
        ids = tokenizer.encode((folder / f"heldout_{domain}.txt").read_text(encoding="utf-8")).ids
        windows = torch.tensor(ids[: len(ids) // 512 * 512]).view(-1, 512)[:32].to(device)
        with torch.inference_mode():
            logits = model(input_ids=windows).logits[:, 256:-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 257:].flatten())
        print(f"held-out {domain}: perplexity {math.exp(float(loss)):.3f} ({len(ids)} tokens)", flush=True)


def save(model: Any, folder: Path, out: Path) -> None:
    """config.json, the tokenizer, and the weights in shards of at most SHARD_BYTES with their index."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    weights = {n: p.detach().contiguous() for n, p in model.named_parameters() if n != "lm_head.weight"}
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, value in weights.items():
        if sum(v.nbytes for v in shards[-1].values()) + value.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = value
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, out / name, metadata={"format": "pt"})
    index = {"weight_map": {n: file for file, shard in zip(names, shards, strict=True) for n in shard}}
    index["metadata"] = {"total_size": str(sum(v.nbytes for v in weights.values()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": [type(model).__name__]}
    (out / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((folder / name).read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    corpus = commands.add_parser("corpus")
    corpus.add_argument("folder", type=Path)
    corpus.add_argument("--chars", type=int, default=180_000_000, help="characters of training text at most")
    training = commands.add_parser("train")
    training.add_argument("folder", type=Path, help="what `corpus` wrote")
    training.add_argument("out", type=Path)
    training.add_argument("--minutes", type=float, default=6.0)
    training.add_argument("--steps", type=int, help="instead of minutes")
    training.add_argument("--chars", type=int, help="read only so much of the text")
    training.add_argument("--hidden", type=int, default=512)
    training.add_argument("--ffn", type=int, default=1536)
    training.add_argument("--layers", type=int, default=8)
    training.add_argument("--experts", type=int, default=0, help="a mixture of so many")
    training.add_argument("--top", type=int, default=2, help="experts of a token")
    training.add_argument(
        "--upcycle", type=float, default=0.0, help="share of the time for the dense model they start from"
    )
    training.add_argument("--no-compile", action="store_true", help="for runs of a minute or two")
    training.add_argument("--batch", type=int, default=64)
    training.add_argument("--context", type=int, default=1024)
    training.add_argument("--rate", type=float, default=2e-3)
    training.add_argument("--warmup", type=int, default=200)
    args = parser.parse_args()
    if args.command == "corpus":
        build_corpus(args.folder, args.chars)
    else:
        train(args)


if __name__ == "__main__":
    main()

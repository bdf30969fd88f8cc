"""Small models that two ranks run together, and what both sides of the test compute; run as a program it is rank 1.

python rank_cases.py FOLDER        (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, as torchrun does)
"""

import ctypes
import gc
import json
import mmap
import os
import shutil
import sys
import unittest.mock
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nstf.runtime
from nstf import quantizers
from nstf.errors import NstfError, UnsupportedError
from nstf.kernels.formats import EncodedTensor, FormatError, Node, array_specs
from nstf.kernels.formats.dense import Params as Dense
from nstf.kernels.formats.integer import Params as Int
from nstf.runtime import divided_engine, divided_modules, engine_generate, filling, graph_generate, loading
from nstf.runtime.artifact import Shared, open_artifact, write_artifact
from nstf.runtime.graph_decoder import Decoder
from nstf.runtime.skeleton import build_skeleton, parameter_names

BASE = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
# Tied and untied heads of 64 + 36 tokens, biases of q, k, v and of o, fewer KV heads than ranks, norms of heads and of
# outputs with a scaled table, experts. Odd layers of the first are stored as dense bfloat16.
CASES: dict[str, dict[str, Any]] = {
    "llama, tied, biases": {
        **BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen 2, one KV head": {
        **BASE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1,
    },
    "gemma 3": {
        **BASE, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True,
        "sliding_window": 16,
    },
    "qwen 3, experts": {
        **BASE, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
}  # fmt: skip
# Norms over the queries and keys of all ranks, the latter's heads shared.
for number, kv_heads in (("2", 2), ("3", 1)):
    CASES[f"olmo {number}"] = {
        **BASE, "model_type": f"olmo{number}", "architectures": [f"Olmo{number}ForCausalLM"],
        "num_key_value_heads": kv_heads,
    }  # fmt: skip
# Of widths that the kernels of GPUs take.
LARGER = {
    **BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 512,
    "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
# Whose arrays are many pages.
WIDER = {
    **BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 1024,
    "intermediate_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 8, "head_dim": 128,
}  # fmt: skip
WITHOUT_DECODER = ("qwen3_moe", "olmo2", "olmo3")
BY_ENGINE = ("llama, tied, biases", "qwen 2, one KV head", "gemma 3")
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
LIMIT = timedelta(minutes=5)  # for a machine that is busy with other things


def dense(values: torch.Tensor) -> EncodedTensor:
    name = str(values.dtype).removeprefix("torch.")
    return EncodedTensor(Node("dense", Dense(name)), tuple(values.shape), {"values": values})


def write(folder: Path, name: str) -> Path:
    """The artifact of a case."""
    path = path_of(folder, name)
    write_model(path, CASES[name], 8)
    return path


def write_model(path: Path, config: dict[str, Any], group: int) -> None:
    """An artifact with random weights, 4-bit integers in groups of some columns."""
    torch.manual_seed(0)
    model = build_skeleton(config)
    stored = set(parameter_names(model))
    method: Any = quantizers.method("int_grid")
    tensors: dict[str, Any] = {}
    for parameter, value in model.named_parameters(remove_duplicate=False):
        weight = torch.randn(value.shape) * 0.2
        if parameter not in stored:
            tensors[parameter] = Shared("model.embed_tokens.weight")
        elif weight.dim() == 1:
            tensors[parameter] = dense(weight + ("norm" in parameter))
        elif ".layers.1.self_attn" in parameter:
            tensors[parameter] = dense(weight.bfloat16())
        elif weight.dim() == 2:
            tensors[parameter] = method.encode(weight, method.Params(bits=4, group=group))
        else:
            tensors[parameter] = method.encode(weight, method.Params(bits=4, group=group, lead=2))
    write_artifact(path, tensors, {"config.json": json.dumps(config).encode()})


def prompt() -> torch.Tensor:
    return torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))


def outcome(path: Path, ranks: int) -> dict[str, Any]:
    """Logits in two dtypes, greedy tokens by transformers and by the captured decoder's step, and what is held."""
    found: dict[str, Any] = {}
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            model: Any = nstf.runtime.load(path, dtype=dtype, engine="off", tensor_parallel=ranks)
            found[str(dtype)] = model(prompt()).logits
            with unittest.mock.patch.object(divided_modules, "LONG_ROWS", 5):
                found[f"{dtype} in pieces"] = model(prompt()).logits
        found["tokens"] = model.generate(prompt(), **GREEDY)
        if model.config.model_type not in WITHOUT_DECODER:
            decoder = Decoder(model)
            found["captured"] = list(decoder.generate(prompt(), 8))
            found["captured again"] = list(decoder.generate(prompt(), 8))
    found["bytes"] = sum(t.numel() * t.element_size() for t in {*model.parameters(), *model.buffers()})
    found["refused to save"] = refusal(lambda: model.save_pretrained(path.parent / "saved"))
    return found


def by_engine(path: Path, ranks: int) -> dict[str, Any]:
    """Greedy tokens and logits of the C++ engine, without int8 activations and with them."""
    found: dict[str, Any] = {}
    ids = prompt()[:1]
    for way in ("exact", "auto"):
        model: Any = nstf.runtime.load(path, engine=way, tensor_parallel=ranks)
        found[f"{way} tokens"] = model.generate(ids, **GREEDY)
        engine = model.nstf_engine.engine
        engine.reset()
        found[f"{way} logits"] = engine.forward(ids[0], all_logits=True)
    return found


def no_engine(path: Path, rank: int) -> torch.Tensor:
    """Tokens where the second rank has no engine."""
    model: Any = nstf.runtime.load(path, engine="exact", tensor_parallel=2)
    error = UnsupportedError("no engine here") if rank else None
    real = divided_engine.Engine
    with unittest.mock.patch.object(divided_engine, "Engine", side_effect=error, wraps=real):
        with unittest.mock.patch.object(engine_generate, "_run") as run:
            tokens: torch.Tensor = model.generate(prompt()[:1], **GREEDY)
    assert not run.called
    return tokens


def one_hook(path: Path, rank: int) -> list[tuple[torch.Tensor, int, int]]:
    """Tokens with a hook on the first rank, without it, with it again; how often this rank used its engine each time, and
    how often it had built one by then."""
    model: Any = nstf.runtime.load(path, engine="exact", tensor_parallel=2)
    found = []
    real = divided_engine.Engine
    with unittest.mock.patch.object(divided_engine, "Engine", wraps=real) as built:
        for hooked in (True, False, True):
            hook = model.lm_head.register_forward_hook(lambda *_: None) if hooked and not rank else None
            with unittest.mock.patch.object(engine_generate, "_run", wraps=engine_generate._run) as run:
                tokens = model.generate(prompt()[:1], **GREEDY)
            found.append((tokens, run.call_count, built.call_count))
            if hook is not None:
                hook.remove()
    return found


class Words:
    """A tokenizer of one word a token; every prompt is the same."""

    def __call__(self, text: str, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[3, 5, 7]])}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f"w{i} " for i in ids)


def streamed(path: Path, rank: int, engine: str) -> dict[str, str]:
    """Text to its end, up to a stop string, and again after callers that left at different pieces."""
    model: Any = nstf.runtime.load(path, engine=engine, tensor_parallel=2)
    tokenizer = Words()

    def text(*stops: str) -> str:
        return "".join(nstf.runtime.stream(model, tokenizer, "", 12, temperature=5.0, stops=stops))

    whole = text()
    words = whole.split()
    stop = max(words, key=words.index) + " "
    stopped = text(stop)
    left = nstf.runtime.stream(model, tokenizer, "", 12)
    for _ in range(1 + 4 * rank):
        next(left)
    left.close()  # type: ignore[attr-defined]
    return {"whole": whole, "stop": stop, "stopped": stopped, "again": text()}


def refusals(folder: Path, rank: int) -> list[str]:
    """The messages of loads that the ranks refuse."""
    files = [("0.nstf", 3), ("uncut.nstf", 2), ("gpt2.nstf", 2), ("0.nstf" if rank else "1.nstf", 2)]
    files += [("missing.nstf" if rank else "0.nstf", 2)]
    found = [refusal(partial(nstf.runtime.load, folder / name, tensor_parallel=n)) for name, n in files]
    # One rank's part is damaged, which it finds while the parts are exchanged.
    error = FormatError("no such code") if rank else None
    with unittest.mock.patch.object(filling, "check_values", side_effect=error):
        return [*found, refusal(partial(nstf.runtime.load, folder / "1.nstf", tensor_parallel=2))]


def outside(path: Path) -> str:
    """What a token beyond the vocabulary says."""
    model: Any = nstf.runtime.load(path, engine="off", tensor_parallel=2)
    try:
        model(torch.tensor([[3, 100]]))
    except IndexError as error:
        return str(error)
    return "nothing was refused"


def fallback(path: Path, rank: int) -> dict[str, Any]:
    """Tokens where all ranks have a decoder of their own, and where one has none; how often each rank used it."""
    found: dict[str, Any] = {}
    for name, lacking in (("all", False), ("one", True)):
        model: Any = nstf.runtime.load(path, engine="off", tensor_parallel=2)

        def build(loaded: Any, lacking: bool = lacking) -> Decoder:
            if lacking and rank:
                raise UnsupportedError("no decoder here")
            return Decoder(loaded)

        graph_generate.use_graphs(model, build)
        with unittest.mock.patch.object(graph_generate, "_run", wraps=graph_generate._run) as run:
            found[name] = model.generate(prompt(), **GREEDY), run.call_count
    return found


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except NstfError as error:
        return str(error)
    return "nothing was refused"


def write_wide(folder: Path) -> None:
    """A model of random codes, twice: what one rank reads of its copy does not help the other."""
    tree = Node("int", Int(bits=4, group=128))
    tensors: dict[str, Any] = {}
    for name, value in build_skeleton(WIDER).named_parameters():
        if value.dim() == 1:
            tensors[name] = dense(torch.ones(value.shape))
            continue
        arrays = {
            path: torch.randint(0, 255, spec.shape, dtype=torch.uint8)
            if spec.dtype == torch.uint8
            else torch.rand(spec.shape).to(spec.dtype)
            for path, spec in array_specs(tree, tuple(value.shape)).items()
        }
        tensors[name] = EncodedTensor(tree, tuple(value.shape), arrays)
    for rank in (0, 1):
        write_artifact(folder / f"wide{rank}.nstf", tensors, {"config.json": json.dumps(WIDER).encode()})


def resident(address: int, size: int) -> int:
    """Bytes of a mapping whose pages are in memory."""
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
        return size
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def bytes_read(path: Path) -> tuple[int, int, int]:
    """(bytes of the file in memory before a load, after it, bytes of what this rank holds): nothing is read ahead."""
    opened: list[Any] = []

    def without_reading_ahead(*arguments: Any, **options: Any) -> Any:
        artifact: Any = open_artifact(*arguments, **options)
        artifact._mapping.madvise(mmap.MADV_RANDOM)
        opened.append(torch.frombuffer(artifact._mapping, dtype=torch.uint8))
        before.append(resident(opened[0].data_ptr(), len(opened[0])))
        return artifact

    before: list[int] = []
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with unittest.mock.patch.object(loading, "open_artifact", without_reading_ahead):
        model: Any = nstf.runtime.load(path, verify=False, engine="off", tensor_parallel=2)
    held = [*model.parameters(), *(m for m in model.buffers() if m.nbytes)]
    for array in held:
        array.sum()  # what is mapped is read now
    return before[0], resident(opened[0].data_ptr(), len(opened[0])), sum(array.nbytes for array in held)


def both_sides(folder: Path) -> dict[str, Any]:
    """What each rank computes, in the same order; the group is left open, since the first rank must not go first."""
    dist.init_process_group("gloo", timeout=LIMIT)
    found: dict[str, Any] = {name: outcome(path_of(folder, name), 2) for name in CASES}
    for way in ("off", "auto"):
        found[f"streamed, engine {way}"] = streamed(path_of(folder, "gemma 3"), dist.get_rank(), way)
    found |= {f"{name} by engine": by_engine(path_of(folder, name), 2) for name in BY_ENGINE}
    found["no engine"] = no_engine(path_of(folder, BY_ENGINE[0]), dist.get_rank())
    found["one hook"] = one_hook(path_of(folder, BY_ENGINE[0]), dist.get_rank())
    # A file of its own, as on another host: parts are exchanged.
    own = folder / f"own{dist.get_rank()}.nstf"
    shutil.copyfile(path_of(folder, BY_ENGINE[0]), own)
    found["own copy"] = outcome(own, 2)
    found["read"] = bytes_read(folder / f"wide{dist.get_rank()}.nstf")
    found["fallback"] = fallback(path_of(folder, "llama, tied, biases"), dist.get_rank())
    found["outside"] = outside(path_of(folder, "llama, tied, biases"))
    return found | {"refusals": refusals(folder, dist.get_rank())}


def thread_names() -> list[str]:
    """Of this process's threads, where the system tells."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def path_of(folder: Path, name: str) -> Path:
    return folder / f"{sorted(CASES).index(name)}.nstf"


def on_gpus(path: Path, ranks: int) -> dict[str, Any]:
    """Logits and tokens of captured graphs: of more tokens than fit the first cache, so that one is captured anew."""
    found: dict[str, Any] = {}
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            model: Any = nstf.runtime.load(path, "cuda", dtype, tensor_parallel=ranks)
            ids = prompt().to(model.device)
            found[str(dtype)] = model(ids).logits.cpu()
            found[f"tokens in {dtype}"] = model.generate(ids, **GREEDY | {"max_new_tokens": 600}).cpu()
            assert model.nstf_graphs.engine is not None, "no graph was captured"
    return found


def prompts_on_gpus(path: Path, ranks: int) -> dict[str, Any]:
    """Logits of a prompt three times, which is captured the second time, and of a shorter one, which is replayed at once."""
    model: Any = nstf.runtime.load(path, "cuda", torch.bfloat16, tensor_parallel=ranks)
    decoder: Any = Decoder(model)
    ids = torch.randint(3, 1000, (1, 500), generator=torch.Generator().manual_seed(2)).to(model.device)
    with torch.no_grad():
        found = [decoder.prompt(some).cpu() for some in (ids, ids, ids, ids[:, :470])]
    return {"prompts": found, "graphs": len(decoder._prompts._graphs)}


if __name__ == "__main__" and sys.argv[2:] == ["gpus"]:
    results = on_gpus(Path(sys.argv[1]) / "larger.nstf", 2)
    results["codes"] = prompts_on_gpus(Path(sys.argv[1]) / "codes.nstf", 2)
    torch.save(results, Path(sys.argv[1]) / f"gpu{dist.get_rank()}.pt")
    gc.collect()  # NCCL waits for graphs that hold its sums
    dist.destroy_process_group()
elif __name__ == "__main__":
    torch.set_num_threads(1)
    results = both_sides(Path(sys.argv[1]))
    torch.save(results, Path(sys.argv[1]) / "rank1.pt")
    dist.destroy_process_group()
    # A thread of gloo's that still runs while Python ends has ended the process by SIGABRT.
    assert not [name for name in thread_names() if "gloo" in name], thread_names()

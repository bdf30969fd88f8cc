"""A model divided over ranks against the same model on one, in one run: decoding, prefill, memory, loading.

    python benchmarks/tensor_parallel.py [--shape 70b] [--format int4] [--layers N] [--ranks 2] [--device cuda]
        [--dtype bfloat16] [--batches 1 16] [--prompt 512] [--tokens 64] [--rounds 5] [--folder DIR] [--json FILE]

Makes an artifact of the shape of Llama-3 70B or 8B (or `small`, for CPUs) with random codes, a tensor at a time: no dense
weight ever exists, and what it predicts means nothing. Then it starts a process for each rank (NCCL on GPUs, gloo on CPUs).
All load their parts; the first also loads the whole model. In rounds that alternate, all decode together and then the first
alone, while the others wait: the step of runtime/graph_decoder.py, a captured graph on GPUs; one sequence on CPUs by the C++
engine. A rate is new tokens of all
sequences after a prompt over the time from the first to the last; prefill is the prompt as `generate` runs it (up to 1024
tokens of all sequences a captured graph), and with it through transformers' modules one by one.
Memory is what torch's allocator has after loading and at the peak of decoding (on a CPU: the bytes of the arrays). Before
that, all-reduces of several sizes are timed, and their sums checked. Logits of all ranks and of one are compared after a
prompt, and those of a captured prompt with the modules'. The file is deleted unless --folder is given.

The first rank says what it begins with, one line for each phase with the seconds since it started: a run that is cut off, or
that hangs, ends with the phase it was in. The first decoding and the first prompt compile kernels.
"""

import argparse
import gc
import json
import math
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from random_models import CONFIGS, LLAMA, tensors
from torch import Tensor

import nstf.runtime
from nstf.kernels.formats import EncodedTensor, Node, array_specs, decode
from nstf.kernels.formats.tree import format_of
from nstf.runtime import peer_sums
from nstf.runtime.artifact import Source, open_artifact, write_artifact
from nstf.runtime.graph_decoder import Decoder
from nstf.runtime.graph_prompt import CAPTURED_FROM
from nstf.runtime.graphs import Graphs
from nstf.runtime.parameter import EncodedParameter
from nstf.runtime.ranks import Ranks, use_own_cores
from nstf.runtime.skeleton import build_skeleton

SHAPES: dict[str, dict[str, Any]] = {
    "70b": {**CONFIGS["70b-layers"], "vocab_size": 128256, "num_hidden_layers": 80},
    "8b": CONFIGS["8b"],
    "small": {
        **LLAMA, "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip


def leaf(kind: str, **params: Any) -> Node:
    return Node(kind, format_of(kind).Params(**params))


INT4, INT8 = leaf("int", bits=4, group=128), leaf("int", bits=8, group=128)
# (of matrices, of table and head)
FORMATS = {"int4": (INT4, INT4), "trellis3": (leaf("trellis", quarter_bits=(12,)), INT8)}
LINK_BYTES = (1 << 14, 1 << 20, 1 << 26)
# Sums of 8192 float32 values for each of 1, 16 and 512 tokens, and how many of them a graph has.
CAPTURED_BYTES, IN_A_GRAPH = (1 << 15, 1 << 19, 1 << 24), 20


def make(config: dict[str, Any], name: str, path: Path) -> int:
    """Writes the artifact and gives back its bytes. Tensors of one shape have the same codes: making them costs more."""
    made: dict[tuple[str, tuple[int, ...]], EncodedTensor] = {}
    body, ends = FORMATS[name]

    def source(tensor: str, shape: tuple[int, ...]) -> Source | EncodedTensor:
        if len(shape) == 1:
            tree = leaf("dense", dtype="bfloat16")
            return EncodedTensor(tree, shape, {"values": torch.ones(shape, dtype=torch.bfloat16)})
        tree = ends if tensor.endswith(("embed_tokens.weight", "lm_head.weight")) else body

        def load() -> EncodedTensor:
            key = tree.kind, shape
            if key not in made:
                made[key] = random_encoded(tree, shape)
            return made[key]

        return Source(tree, shape, "bfloat16", load)

    stated = {**config, "dtype": "bfloat16"}
    return write_artifact(
        path, {n: source(n, s) for n, s in tensors(config)}, {"config.json": json.dumps(stated).encode()}
    )


def random_encoded(tree: Node, shape: tuple[int, ...]) -> EncodedTensor:
    """Random codes, and scales that make weights of a standard deviation of 0.02."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    some = (64, *shape[1:])
    whole, sample = (_random(tree, s, device) for s in (shape, some))
    factor = 0.02 / float(decode(EncodedTensor(tree, some, sample)).std())
    name = next(n for n in ("scale_super", "scale") if n in whole)
    whole[name] = (whole[name] * factor).to(whole[name].dtype)
    return EncodedTensor(tree, shape, {n: a.cpu() for n, a in whole.items()})


def _random(tree: Node, shape: tuple[int, ...], device: str) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    arrays = {}
    for path, spec in array_specs(tree, shape).items():
        if spec.dtype == torch.uint8:
            # Eight at a time: a random number for every byte takes minutes on a CPU.
            words = torch.randint(
                -(1 << 63),
                (1 << 63) - 1,
                (-(-math.prod(spec.shape) // 8),),
                generator=generator,
                device=device,
            )
            arrays[path] = words.view(torch.uint8)[: math.prod(spec.shape)].reshape(spec.shape)
        else:
            values = torch.rand(spec.shape, generator=generator, device=device) + 0.5
            arrays[path] = values.to(spec.dtype)
    return arrays


class Times:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass


Say = Callable[[str], None]


def said_by(rank: int) -> Say:
    """Prints what the first rank begins with, and the seconds since this call; nothing on the others."""
    start = time.perf_counter()

    def say(phase: str) -> None:
        if rank == 0:
            print(f"{time.perf_counter() - start:8.1f} s: {phase}", flush=True)

    return say


class Contender:
    """A loaded model with its decoder, and how long loading took."""

    def __init__(self, path: Path, device: torch.device, ranks: int, dtype: torch.dtype) -> None:
        self.device = device
        gc.collect()  # what is left of a model before it would take memory, and be counted
        dist.barrier()
        before, start = allocated(device), time.perf_counter()
        self.model: Any = nstf.runtime.load(
            path, device, dtype, verify=False,
            engine="off" if device.type == "cuda" else "auto", tensor_parallel=ranks,
        )  # fmt: skip
        encoded = [m for m in self.model.modules() if isinstance(m, EncodedParameter)]
        for parameter in encoded:
            parameter.encoded  # noqa: B018  (puts the codes in the kernels' order)
        synchronise(device)
        self.load_seconds = time.perf_counter() - start
        self.bytes = sum({id(m): m.size_bytes for m in encoded}.values())
        self.held = allocated(device) - before if device.type == "cuda" else self.bytes
        self.decoder = Decoder(self.model)

    def decode(self, ids: Tensor, new: int) -> float:
        """New tokens a second, of all sequences: on a CPU one by `generate`, which has the C++ engine."""
        if self.device.type == "cpu" and len(ids) == 1:
            times = Times()
            self.model.generate(
                ids, max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, streamer=times
            )
            return (new - 1) / (times.at[-1] - times.at[1])  # the prompt comes first
        start = 0.0
        for i, _ in enumerate(self.decoder.generate(ids, new)):
            start = time.perf_counter() if i == 0 else start
        return len(ids) * (new - 1) / (time.perf_counter() - start)

    def logits(self, ids: Tensor) -> Tensor:
        """After the last token of each sequence."""
        found: Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        return found

    def noise(self, ids: Tensor) -> float:
        """How far its own logits move, relatively, when eight numbers of each first token's embedding are a rounding step
        away. What is rounded to 16 bits after every sum ends as far apart, whatever differs in the order of sums."""
        table = self.model.get_input_embeddings()(ids)
        moved = table.clone()
        moved[:, 0, :8] *= 1 + torch.finfo(moved.dtype).eps
        own, other = (
            self.model(inputs_embeds=x, use_cache=False, logits_to_keep=1).logits.double()
            for x in (table, moved)
        )
        return float((own - other).norm() / own.norm())

    def prefill(self, ids: Tensor, captured: bool) -> float:
        """Tokens a second; as `generate` runs the prompt if `captured`, else by the modules."""
        synchronise(self.device)
        start = time.perf_counter()
        if captured:
            self.decoder.prompt(ids)
        else:
            self.logits(ids)
        synchronise(self.device)
        return ids.numel() / (time.perf_counter() - start)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def links(device: torch.device) -> list[dict[str, float]]:
    """Times of all-reduces in float32. Raises SystemExit where a sum is wrong: a link that claims to work and does not."""
    rows = []
    for size in LINK_BYTES:
        values = torch.arange(size // 4, device=device).remainder(1000).float() + dist.get_rank()
        expected = dist.get_world_size() * (values - dist.get_rank()) + sum(range(dist.get_world_size()))
        times = []
        for _ in range(10):
            work = values.clone()
            synchronise(device)
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(work)
            synchronise(device)
            times.append(time.perf_counter() - start)
            if not torch.equal(work, expected):
                raise SystemExit(f"the sum over ranks of {size} bytes is wrong: this link cannot be used")
        rows.append({"bytes": size, "seconds": median(times[2:])})
    return rows


def captured_sums(device: torch.device, ranks: Ranks) -> list[dict[str, Any]]:
    """For each of CAPTURED_BYTES the seconds of a sum in a graph of IN_A_GRAPH, by NCCL and as the runtime does it."""
    rows = []
    for size in CAPTURED_BYTES:
        values = torch.ones(size // 4, device=device)
        row: dict[str, Any] = {"bytes": size}
        for name, way in (("nccl", dist.all_reduce), ("runtime", ranks.sum)):

            def step(way: Any = way, values: Tensor = values) -> None:
                for _ in range(IN_A_GRAPH):
                    way(values.fill_(1.0))

            replay, times = Graphs(device)(step), []
            for _ in range(10):
                synchronise(device)
                dist.barrier()
                synchronise(device)
                start = time.perf_counter()
                replay()
                synchronise(device)
                times.append((time.perf_counter() - start) / IN_A_GRAPH)
            if not bool((values == ranks.size).all()):
                raise SystemExit(f"a captured sum of {size} bytes ({name}) is wrong")
            row[name] = median(times[2:])
        rows.append(row)
    return rows


def read_seconds(path: Path, size: int, rank: int) -> float:
    """Time to read so many bytes of the file by large reads, into one buffer."""
    buffer = memoryview(bytearray(1 << 24))
    start, left = time.perf_counter(), size
    with path.open("rb", buffering=0) as file:
        file.seek(min(rank * size, max(0, path.stat().st_size - size)))
        while left > 0 and (count := file.readinto(buffer)):  # type: ignore[attr-defined]
            left -= count
    return time.perf_counter() - start


def rank_main(rank: int, port: int, options: argparse.Namespace, path: Path, results: Path) -> None:
    """What every process does; the first writes the results."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Multicast (NVLS) needs rights on the fabric that containers often lack; sums of these sizes do without.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
        use_own_cores(rank, options.ranks)
    say = said_by(rank)
    say("connecting the ranks")
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    with torch.no_grad():
        found = measure(rank, device, options, path, say)
    say("collecting the ranks' results")
    everything: list[Any] = [None] * options.ranks
    dist.all_gather_object(everything, found)
    if rank == 0:
        results.write_text(json.dumps({"ranks": everything}))
    dist.barrier()
    gc.collect()  # NCCL waits for graphs that hold its sums
    dist.destroy_process_group()


def measure(
    rank: int, device: torch.device, options: argparse.Namespace, path: Path, say: Say
) -> dict[str, Any]:
    """The figures of one rank."""
    usual = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, options.dtype or usual)
    say("timing all-reduces")
    found: dict[str, Any] = {"links": links(device)}
    if device.type == "cuda" and options.ranks > 1:
        say("making sums by memory")
        peer_sums.make(Ranks(rank, options.ranks), device)
        there = peer_sums.made(options.ranks, device) is not None
        say(f"timing captured sums ({'by memory' if there else 'no memory is shared'})")
        found["captured"] = captured_sums(device, Ranks(rank, options.ranks))
        if rank == 0:
            print(json.dumps(found["captured"]), flush=True)
    say("importing the model's classes")
    with open_artifact(path) as artifact:
        build_skeleton(artifact.config())  # imports the model's classes, which is not loading
    say(f"loading on {options.ranks} ranks")
    divided = Contender(path, device, options.ranks, dtype)
    dist.barrier()
    found |= {"load_seconds": divided.load_seconds, "bytes": divided.bytes, "held": divided.held}
    say(f"loading again (the first time took {divided.load_seconds:.2f} s)")
    # The first load also compiles kernels and starts libraries.
    found["again_seconds"] = Contender(path, device, options.ranks, dtype).load_seconds
    dist.barrier()
    say("reading as many bytes of the file")
    found["read_seconds"] = read_seconds(path, divided.bytes, rank)
    dist.barrier()
    say("loading the whole model on the first rank")
    whole: Contender | None = None
    if rank == 0:
        whole = divided if options.ranks == 1 else Contender(path, device, 1, dtype)
    else:
        dist.barrier()
    if whole is not None:
        found["whole"] = {"load_seconds": whole.load_seconds, "bytes": whole.bytes, "held": whole.held}
    for batch in options.batches:
        vocabulary = divided.model.config.vocab_size
        ids = torch.randint(
            3, vocabulary, (batch, options.prompt), generator=torch.Generator().manual_seed(0)
        )
        ids = ids.to(device)
        found[f"batch {batch}"] = {}
        ways: dict[str, Callable[[Contender], float]] = {
            "decode": lambda c, ids=ids: c.decode(ids, options.tokens),
            "prefill": lambda c, ids=ids: c.prefill(ids, device.type == "cuda"),
        }
        if device.type == "cuda":
            ways["prefill by modules"] = lambda c, ids=ids: c.prefill(ids, False)
        for kind, way in ways.items():
            rates = in_turn(
                divided, whole, way, options.rounds, lambda at, k=kind, b=batch: say(f"{k}, batch {b}, {at}")
            )
            found[f"batch {batch}"][kind] = rates
            if rank == 0:  # at once: what comes later may not come
                print(f"{kind}, batch {batch}: {line_of(rates)}", flush=True)
        say(f"logits, batch {batch}")
        dist.barrier()
        ours = divided.logits(ids).double()
        if device.type == "cuda":
            captured = divided.decoder.prompt(ids).double()
            found[f"batch {batch}"]["captured"] = float((captured - ours[:, -1]).norm() / ours.norm())
        dist.barrier()
        if whole is not None:
            theirs = whole.logits(ids).double()
            found[f"batch {batch}"]["difference"] = float((ours - theirs).norm() / theirs.norm())
            found[f"batch {batch}"]["noise"] = whole.noise(ids)
        dist.barrier()
        if device.type == "cuda":
            say(f"peak of memory, batch {batch}")
            torch.cuda.reset_peak_memory_stats(device)
            divided.decode(ids, 8)
            found[f"batch {batch}"]["peak"] = int(torch.cuda.max_memory_allocated(device))
    return found


def in_turn(
    divided: Contender, whole: Contender | None, call: Callable[[Contender], float], rounds: int, say: Say
) -> dict[str, list[float]]:
    """Rates of all ranks together, and of the first alone; the rounds up to the capture of a prompt are not counted, and
    announced one by one."""
    rates: dict[str, list[float]] = {"divided": [], "whole": []}
    for at in range(rounds + CAPTURED_FROM):
        counted = at >= CAPTURED_FROM
        if at == CAPTURED_FROM:
            say(f"{rounds} rounds")
        dist.barrier()
        if not counted:
            say(f"round {at - CAPTURED_FROM}, all ranks")
        rates["divided"].append(call(divided))
        dist.barrier()
        if whole is not None:
            if not counted:
                say(f"round {at - CAPTURED_FROM}, the first rank alone")
            rates["whole"].append(call(whole))
        dist.barrier()
    return {name: values[CAPTURED_FROM:] for name, values in rates.items()}


def line_of(rates: dict[str, list[float]]) -> str:
    """The medians of all ranks together and of one, and how many times the former are the latter."""
    divided, alone = median(rates["divided"]), median(rates["whole"])
    return f"{divided:12.1f}{alone:12.1f}{divided / alone:8.2f}"


def report(options: argparse.Namespace, size: int, found: dict[str, Any]) -> None:
    """The tables."""
    first, n = found["ranks"][0], options.ranks
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{os.cpu_count()} cores"
    print(
        f"{options.shape}, {options.format}, {size / 1e9:.2f} GB; {n} ranks, {where}, torch {torch.__version__}"
    )
    for row in first["links"]:
        print(f"  all-reduce of {row['bytes']:>9} bytes: {1e6 * row['seconds']:.1f} us")
    for row in first.get("captured", []):
        nccl, own = 1e6 * row["nccl"], 1e6 * row["runtime"]
        print(f"  captured sum of {row['bytes']:>9} bytes: NCCL {nccl:.1f} us, the runtime {own:.1f} us")
    whole = first["whole"]
    for rank, own in enumerate(found["ranks"]):
        print(
            f"  rank {rank}: {own['bytes'] / 1e9:.3f} GB of {whole['bytes'] / 1e9:.3f} "
            f"({own['bytes'] / whole['bytes']:.3f}); held {own['held'] / whole['held']:.3f} of one; "
            f"loaded in {own['load_seconds']:.2f} s, again in {own['again_seconds']:.2f}, "
            f"reading as much took {own['read_seconds']:.2f} s"
        )
    print(f"{'':30}{f'{n} ranks':>12}{'one':>12}{'times':>8}")
    for batch in options.batches:
        for kind in ("decode", "prefill", "prefill by modules"):
            if kind not in first[f"batch {batch}"]:
                continue
            print(f"{f'{kind}, batch {batch}':30}{line_of(first[f'batch {batch}'][kind])}")
        row = first[f"batch {batch}"]
        print(
            f"logits, batch {batch}: relative difference {row['difference']:.1e}; one process's own logits move by "
            f"{row['noise']:.1e} where eight numbers of a token are a rounding step away"
        )
        if "captured" in row:
            print(f"  as `generate` runs the prompt they differ from the modules' by {row['captured']:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="70b")
    parser.add_argument("--format", choices=sorted(FORMATS), default="int4")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of activations; float32 on a CPU")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where the file goes and stays (a temporary folder if none)"
    )
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        parser.exit(1, f"tensor_parallel.py: {options.ranks} GPUs are needed; nothing was measured\n")
    config = SHAPES[options.shape] | ({"num_hidden_layers": options.layers} if options.layers else {})
    with tempfile.TemporaryDirectory(prefix="nstf-") as temporary:
        folder = options.folder or Path(temporary)
        path = folder / f"{options.shape}-{config['num_hidden_layers']}-{options.format}.nstf"
        start = time.perf_counter()
        size = path.stat().st_size if path.exists() else make(config, options.format, path)
        print(f"made in {time.perf_counter() - start:.0f} s", flush=True)
        results = Path(temporary) / "results.json"
        run_ranks(options, path, results)
        found = json.loads(results.read_text())
        report(options, size, found)
        if options.json:
            stated = {"shape": options.shape, "format": options.format, "layers": config["num_hidden_layers"]}
            options.json.write_text(json.dumps({**stated, "size": size, **found}, indent=1) + "\n")


def run_ranks(options: argparse.Namespace, path: Path, results: Path) -> None:
    """Starts the ranks and waits for them. Raises SystemExit when one fails."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank_main, args=(rank, port, options, path, results))
        for rank in range(options.ranks)
    ]
    for process in ranks:
        process.start()
    try:
        while any(process.is_alive() for process in ranks):
            if any(process.exitcode for process in ranks):
                raise SystemExit("tensor_parallel.py: a rank failed; its message is above")
            time.sleep(0.2)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if any(process.exitcode for process in ranks) or not results.exists():
        raise SystemExit("tensor_parallel.py: a rank failed; its message is above")


if __name__ == "__main__":
    main()

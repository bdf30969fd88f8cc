"""Damage behind right digests, and a file's way through all that a user would do with it. As a program, without pytest:

    python tests/attacks/deep_cases.py SECONDS [WORKERS [FIRST_SEED]]     prints counts; ends with 1 when anything is wrong

Every array's digest and the header's are made anew after the damage, so that nothing is refused for them alone.
"""

import base64
import contextlib
import hashlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Forged
from forked import Counts, Total, Watch, peak_bytes, run_batches
from small_llama import LLAMA, tensors
from test_fuzz import drawn, field_damage, nasty, places

from nstf.errors import NstfError, UnsupportedError
from nstf.kernels.formats import EncodedTensor, array_specs, bitpack, node_from_json
from nstf.runtime import load, loading
from nstf.runtime.artifact import Artifact, open_artifact, verify, write_artifact
from nstf.runtime.engine import Engine

INT4 = {"kind": "int", "bits": 4, "group": 32, "symmetric": False, "scale_bits": 8}
HALF = {"kind": "dense", "dtype": "float16"}
# Every kind, spread over the matrices of the model.
TREES: dict[str, dict[str, Any]] = {
    "model.layers.0.self_attn.q_proj.weight": INT4,
    "model.layers.0.self_attn.k_proj.weight": {"kind": "grid", "group": 32},
    "model.layers.0.self_attn.v_proj.weight": {"kind": "fp8", "group": 32},
    "model.layers.0.self_attn.o_proj.weight": {
        "kind": "rotated", "block_in": 32, "seed": 3, "children": {"x": {"kind": "shuffle"}},
    },
    "model.layers.0.mlp.gate_proj.weight": {"kind": "trellis", "quarter_bits": [8, 10], "rows": [16, 32]},
    "model.layers.0.mlp.up_proj.weight": {
        "kind": "add", "children": {"x": {"kind": "mxfp4"}, "y":
        {"kind": "low_rank", "rank": 3, "children": {"a": HALF, "b": HALF}}},
    },
    "model.layers.0.mlp.down_proj.weight": {
        "kind": "permute", "dims": [1, 0], "children": {"x": {"kind": "cp", "rank": 2, "view": [48, 4, 8],
        "children": {f"factor{i}": HALF for i in range(3)}}},
    },
    "model.embed_tokens.weight": {
        "kind": "tensor_train", "ranks": [4], "view": [64, 32], "children": {"core0": HALF, "core1": INT4 | {"lead": 1}},
    },
}  # fmt: skip
GENERATION = {"eos_token_id": [1, 2], "temperature": 0.7, "top_k": 5, "bos_token_id": 1}
# Keys that a config may have beside those of LLAMA, most of them not declared by its class.
UNDECLARED = (
    "num_labels layer_types rope_scaling sliding_window pad_token_id attention_chunk_size is_causal kv_sharing_modes "
    "output_hidden_states return_dict per_layer_config text_config unpadded_vocab_size"
).split()
# Files of a batch; one in so many takes every step as a user would, through files and the command line.
BATCH, PLAINLY = 200, 20
# Under a sanitizer (make sanitize) all is slower, and freed memory is kept for its sake.
SLOWEST_S = 20.0 if "libasan" in os.environ.get("LD_PRELOAD", "") else 2.0
MEMORY_BYTES = 1 << 30 if SLOWEST_S > 2 else 64 << 20
IDS = torch.tensor([[1, 2, 3]])


def make_model(folder: Path) -> Forged:
    """A model with every kind of tree, taken apart; its file is made in the folder."""
    stored, generator = tensors(), torch.Generator().manual_seed(0)
    for name, tree in TREES.items():
        node, shape = node_from_json(tree), stored[name].shape
        arrays = {
            path: torch.randint(0, 256, spec.shape, generator=generator).to(spec.dtype)
            if spec.dtype == torch.uint8
            else (torch.rand(spec.shape, generator=generator) * 0.02).to(spec.dtype)
            for path, spec in array_specs(node, shape).items()
        }
        if "section" in arrays:
            arrays["section"] = bitpack.pack((torch.arange(48) >= 16).to(torch.uint8)[None], 1)[0]
        for path, array in arrays.items():  # what means NaN is left to the damage
            if array.dtype == torch.uint8 and ("x.scale" in path or tree["kind"] == "fp8"):
                arrays[path] = array % 100
        stored[name] = EncodedTensor(node, shape, arrays)
    path = folder / "whole.nstf"
    files = {
        "config.json": json.dumps(LLAMA).encode(),
        "generation_config.json": json.dumps(GENERATION).encode(),
    }
    write_artifact(path, stored, files, {"plan": {"a": 1}})
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    manifest = json.loads(header.pop("__metadata__")["nstf"])
    for name in files:  # unpacked, so that damage to them is damage to what they say
        assert manifest["files"][name]["encoding"] in ("raw", "zlib")
    return Forged(header, manifest, raw[8 + length :])


def sign(forged: Forged) -> bytes:
    """The file with right digests of every array that lies inside the data, and of the header."""
    digests = b""
    for name in sorted(forged.header):
        try:
            start, end = forged.header[name]["data_offsets"]
            digests += hashlib.sha256(forged.data[start:end]).digest()
        except (KeyError, TypeError, ValueError):
            digests += bytes(32)
    forged.manifest["sha256"] = base64.b64encode(digests).decode()
    return bytes(forged.raw())


def damaged(rng: random.Random, good: Forged) -> bytes:
    """One of: fields of the header and the manifest, values of a config, bytes of arrays."""
    kind = rng.randrange(4)
    if kind == 0:
        raw = field_damage(rng, good)
        length = int.from_bytes(raw[:8], "little")
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            header = json.loads(raw[8 : 8 + length])
            manifest = json.loads(header.pop("__metadata__")["nstf"])
            return sign(Forged(header, manifest, raw[8 + length :]))
        return raw
    forged = good.copy()
    if kind == 1:
        return replaced(forged, "config.json", mutated(rng, LLAMA))
    if kind == 2 and rng.random() < 0.4:
        return replaced(forged, "generation_config.json", mutated(rng, GENERATION))
    data = bytearray(forged.data)
    for _ in range(rng.choice((1, 4, 64))):
        name = rng.choice([n for n in forged.header if not n.startswith("nstf.file/")])
        start, end = forged.header[name]["data_offsets"]
        data[rng.randrange(start, end)] = rng.choice((0, 255, 0x7F, 0x7E, 0x80, 0xFC, rng.randrange(256)))
    forged.data = bytes(data)
    return sign(forged)


def mutated(rng: random.Random, config: dict[str, Any]) -> bytes:
    """A config with some values changed, removed or added, as JSON."""
    changed = json.loads(json.dumps(config))
    for _ in range(rng.choice((1, 1, 2, 4))):
        container, key = rng.choice(places(changed, []))
        with contextlib.suppress(KeyError, IndexError):
            if rng.random() < 0.2:
                del container[key]
            else:
                container[key] = nasty(rng, container[key])
    if rng.random() < 0.2:
        changed[rng.choice(UNDECLARED)] = drawn(rng)
    with contextlib.suppress(ValueError):
        return json.dumps(changed).encode()
    return b"{}"


def replaced(forged: Forged, name: str, content: bytes) -> bytes:
    """The file with another side file, stored as it is; it comes last in the data, where its size moves nothing."""
    array = f"nstf.file/{name}"
    start, end = forged.header[array]["data_offsets"]
    by = len(content) - (end - start)
    forged.data = forged.data[:start] + content + forged.data[end:]
    for entry in forged.header.values():
        if entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]
    forged.header[array]["data_offsets"] = [start, start + len(content)]
    forged.header[array]["shape"] = [len(content)]
    forged.manifest["files"][name] = {"size": len(content), "encoding": "raw"}
    return sign(forged)


def plainly(path: Path) -> str:
    """Opens, verifies, inspects, loads and runs a file as a user would; the furthest stage that was reached."""
    from nstf_convert.cli import run

    stage = "opened"
    try:
        open_artifact(path).close()
        stage = "verified"
        verify(path)
        stage = "inspected"
        assert run(["inspect", str(path), "--json"]) in (0, 5, 6)
        with contextlib.suppress(UnsupportedError):
            list(Engine.open(path).generate([1, 2, 3], 3))
        model: Any = load(path)
        stage = "loaded"
        model(IDS)
        model.generate(IDS, max_new_tokens=3, do_sample=False)
        return "ran"
    except NstfError as error:
        check_message(error)
        return stage


def through_all(path: Path) -> str:
    """The same code as `plainly` on a file that is read once: what that does again for every step is left out."""
    from nstf_convert.cli.inspect import describe_tensor, summarise

    stage = "opened"
    try:
        artifact = open_artifact(path, verify=True)
        stage = "verified"
        summarise(artifact, [describe_tensor(artifact, name, None, 1) for name in artifact.names()])
        stage = "inspected"
        with contextlib.suppress(UnsupportedError):
            list(Engine(artifact).generate([1, 2, 3], 3))
        with already_open(artifact):
            model: Any = load(path, verify=False)
        stage = "loaded"
        model(IDS)
        model.generate(IDS, max_new_tokens=3, do_sample=False)
        return "ran"
    except NstfError as error:
        check_message(error)
        return stage


@contextlib.contextmanager
def already_open(artifact: Artifact) -> Iterator[None]:
    """`load` takes this artifact instead of opening the file again."""
    usual = loading.open_artifact
    loading.open_artifact = lambda *_, **__: artifact
    try:
        yield
    finally:
        loading.open_artifact = usual


def check_message(error: NstfError) -> None:
    assert str(error).isprintable() and len(str(error)) < 1000, str(error)


def batch(seed: int, watch: Watch, count: int, good: Forged, folder: Path) -> Counts:
    """`count` files through all: how far they got, and what was raised that is not ours.

    The file of a case that ends the process, or that raises, stays in the folder.
    """
    torch.set_num_threads(1)
    rng, seen, path = random.Random(seed), dict[str, int](), folder / f"seed{seed}.nstf"
    path.write_bytes(sign(good.copy()))
    for step in (plainly, through_all):
        for _ in range(2):
            assert (stage := step(path)) == "ran", stage
    before = peak_bytes()
    for number in range(count):
        path.write_bytes(damaged(rng, good))
        watch.begin(number)
        try:
            stage = plainly(path) if number % PLAINLY == 0 else through_all(path)
        except Exception as error:
            stage = foreign(error)
            if stage not in seen:
                path.rename(folder / f"seed{seed}.case{number}.nstf")
        watch.rest()
        seen[stage] = seen.get(stage, 0) + 1
    path.unlink(missing_ok=True)
    return {**seen, "peak_grown_bytes": peak_bytes() - before}


def foreign(error: Exception) -> str:
    """A line for an error that is not ours: its class, its words, where it was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "nn/modules/module" not in f.filename]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:]))
    return f"foreign {type(error).__name__}: {error} at {where}"[:300]


def counted(total: Total) -> int:
    """How many files there were."""
    return sum(v for k, v in total.counts.items() if k != "peak_grown_bytes")


def check(total: Total) -> None:
    """Nothing went wrong, and there was something to go wrong."""
    assert total.wrong == [] and total.counts["peak_grown_bytes"] < MEMORY_BYTES, total
    assert [key for key in total.counts if key.startswith("foreign")] == [], total
    assert {"opened", "ran"} <= set(total.counts)


def main() -> int:
    seconds, *numbers = sys.argv[1:]
    workers, first = (*numbers, *("1", "100")[len(numbers) :])
    until = time.monotonic() + float(seconds)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as made:
        folder = Path(made)
        good = make_model(folder)
        total = run_batches(
            lambda seed, watch: batch(seed, watch, BATCH, good, folder),
            range(int(first), 1 << 40),
            hang_s=SLOWEST_S,
            workers=int(workers),
            until=until,
        )
    print(f"{counted(total):,} files", *sorted(total.counts.items()), *total.wrong, sep="\n")
    check(total)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`nstf export --to compressed-tensors`, decompressed by that library and loaded by transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from export_models import TEXTS, sample
from safetensors.torch import load_file

import nstf.runtime
from nstf.kernels.formats import decode
from nstf.runtime.artifact import open_artifact
from nstf_convert.cli import run

compressed_tensors = pytest.importorskip(
    "compressed_tensors", reason="compressed-tensors is not installed: make integrations"
)


def int_grid(bits: int, group: int = 32, symmetric: bool = True, scale_bits: int = 16) -> dict[str, Any]:
    return {
        "kind": "int_grid",
        "bits": bits,
        "group": group,
        "symmetric": symmetric,
        "scale_bits": scale_bits,
    }


FORMS = (
    *(
        int_grid(2),
        int_grid(3, 64),
        int_grid(4, 128),
        int_grid(5),
        int_grid(6),
        int_grid(8, 0),
        int_grid(4, 0),
    ),
    *(int_grid(4, 32, False), int_grid(3, 64, False)),
    *({"kind": "mxfp4"}, {"kind": "fp8", "variant": "e4m3fn"}),
)


def test_the_library_decompresses_to_our_values(tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    artifact, folder = sample(tmp_path / "m.nstf", {"kind": "dense"}, *FORMS), tmp_path / "folder"
    words = ["export", str(artifact), "--to", "compressed-tensors", "-o", str(folder)]
    # A bfloat16 table has values that float16 lacks.
    assert run(words) == 6
    assert run([*words, "--allow-loss"]) == 0
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    arrays = load_file(folder / "model.safetensors")
    seen = set()
    with open_artifact(artifact) as opened:
        for scheme in parsed.config_groups.values():
            for module in scheme.targets:
                own = {
                    k.removeprefix(f"{module}."): v for k, v in arrays.items() if k.startswith(f"{module}.")
                }
                if own["weight_scale"].dtype == torch.float16:
                    # The product is rounded to the scale's dtype: in float32 it is exact.
                    own["weight_scale"] = own["weight_scale"].float()
                kind = str(getattr(scheme.format, "value", scheme.format))
                found = BaseCompressor.get_value_from_registry(kind).decompress(own, scheme)["weight"]
                assert torch.equal(found.float(), decode(opened.encoded(f"{module}.weight")).float()), module
                seen.add((kind, scheme.weights.num_bits, scheme.weights.symmetric))
    assert len(seen) == 10


def test_transformers_loads_the_folder_and_writes_the_same_tokens(tmp_path: Path) -> None:
    # transformers 5.23 expects zero points unpacked and refuses packed ones: the library's own test has them.
    layers = (int_grid(4), int_grid(3, 128), int_grid(8, 0), int_grid(5, 64, True, 8))
    artifact, folder = sample(tmp_path / "m.nstf", int_grid(8), *layers), tmp_path / "folder"
    words = ["export", str(artifact), "--to", "compressed-tensors", "-o", str(folder), "--dtype", "float32"]
    assert run(words) == 0
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours: Any = nstf.runtime.load(artifact, engine="off")
    tokenizer: Any = nstf.runtime.load_tokenizer(artifact)
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            expected = ours(ids).logits
            assert (found(ids).logits - expected).abs().max() < 1e-4 * expected.abs().max()
        options = {"max_new_tokens": 12, "do_sample": False}
        assert torch.equal(found.generate(ids, **options), ours.generate(ids, **options))

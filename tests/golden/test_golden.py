"""Artifacts of every released format version load for ever and mean what they meant."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file

from nstf.kernels.formats import Node, decode, kinds
from nstf.runtime.artifact import open_artifact, verify

HERE = Path(__file__).parent
V1_SHA256 = "ca119c1d9aa3d47083c6dd12107b9d77cfd56e4a18abc3301807d5e05e891fdf"
V1_KINDS = {
    "dense",
    "int",
    "grid",
    "fp8",
    "mxfp4",
    "low_rank",
    "add",
    "permute",
    "cp",
    "tucker",
    "tensor_train",
}
SUMS = {"low_rank", "cp", "tucker", "tensor_train"}  # their last bit depends on the order of a matrix product


def kinds_of(node: Node) -> set[str]:
    return {node.kind}.union(*(kinds_of(child) for child in node.children.values()))


def test_version_1_file_is_the_one_that_was_released() -> None:
    assert hashlib.sha256((HERE / "v1.nstf").read_bytes()).hexdigest() == V1_SHA256


def test_version_1_verifies_and_decodes_to_what_it_did() -> None:
    assert verify(HERE / "v1.nstf").shared_tensors == 1
    expected = load_file(HERE / "v1_decoded.safetensors")
    with open_artifact(HERE / "v1.nstf") as artifact:
        assert set(artifact.names()) == {*expected, "shared"}
        found = set()
        for name, values in expected.items():
            encoded = artifact.encoded(name)
            found |= kinds_of(encoded.tree)
            if encoded.tree.kind in SUMS:
                torch.testing.assert_close(decode(encoded), values, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(decode(encoded), values), name
        assert found == V1_KINDS
        assert torch.equal(decode(artifact.encoded("shared")), expected["int.4"])


def test_version_1_files_and_meta_are_what_they_were() -> None:
    with open_artifact(HERE / "v1.nstf") as artifact:
        assert artifact.file("config.json") == b'{"architectures":["Golden"],"model_type":"golden"}\n' * 4
        assert artifact.file("raw.bin") == bytes(range(64))
        assert artifact.manifest.version == 1
        assert artifact.manifest.plan == {"budget_bytes": 4096}
        assert artifact.manifest.provenance == {"tool": "nstf"}
        assert artifact.manifest.report == {"kld": 0.0625}


def test_version_1_trellis_codes_decode_to_what_they_did() -> None:
    data = (HERE / "v1_trellis.nstf").read_bytes()
    assert (
        hashlib.sha256(data).hexdigest() == "da7b684a2b8be0709c215bf16babb3513b4770a874522a724b5fa15062e8c9de"
    )
    expected = load_file(HERE / "v1_trellis_decoded.safetensors")
    with open_artifact(HERE / "v1_trellis.nstf") as artifact:
        assert set(artifact.names()) == set(expected)
        for name, values in expected.items():
            decoded = decode(artifact.encoded(name))
            if name == "rotated":
                torch.testing.assert_close(decoded, values, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(decoded, values), name


def test_version_1_shuffle_codes_decode_to_what_they_did() -> None:
    data = (HERE / "v1_shuffle.nstf").read_bytes()
    assert (
        hashlib.sha256(data).hexdigest() == "49933e2bcbfc277464bcff4d8171ffed344a7899e84c649d044bbbd80ddde6d8"
    )
    expected = load_file(HERE / "v1_shuffle_decoded.safetensors")
    with open_artifact(HERE / "v1_shuffle.nstf") as artifact:
        assert set(artifact.names()) == set(expected)
        for name, values in expected.items():
            decoded = decode(artifact.encoded(name))
            if name == "rotated":
                torch.testing.assert_close(decoded, values, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(decoded, values), name


def test_every_kind_has_a_golden_file() -> None:
    found: set[str] = set()
    for path in sorted(HERE.glob("*.nstf")):
        with open_artifact(path) as artifact:
            found |= set().union(*(kinds_of(artifact.record(name).tree) for name in artifact.names()))
    assert found == set(kinds())

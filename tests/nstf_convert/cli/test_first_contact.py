"""What a newcomer meets: help, completion, hints, and files that are something else."""

import json
import os
import re
import subprocess
import sys

import pytest

from nstf_convert.cli import SUMMARIES
from nstf_convert.cli.convert import next_step
from nstf_convert.cli.export import next_step as after_export


@pytest.mark.parametrize("words", [(), ("convert",), ("generate",)])
def test_no_arguments_print_the_help_as_it_is(nstf, words):
    result = nstf(*words)
    assert result.code == 2 and result.err == ""
    assert result.out == nstf(*words, "--help").out and len(result.out.splitlines()) > 10


@pytest.mark.parametrize("command", sorted(SUMMARIES))
def test_the_help_names_what_is_taken_in_words(nstf, command):
    text = nstf(command, "--help").out
    assert not re.search(r"[{}]|<(int|str|float|path|list)", text, re.IGNORECASE)
    usage = text.splitlines()[0].split()
    assert usage[:3] == ["Usage:", "nstf", command] and usage[-1].isupper()
    assert "all but chat and serve take --json" in " ".join(text.split())
    assert ("\n  --json " in text) == (command not in ("chat", "serve"))


def test_a_mistyped_command_is_answered_with_the_nearest(nstf):
    result = nstf("serv")
    assert (result.code, result.err) == (
        2,
        "error: no such command 'serv': did you mean 'serve'; see nstf --help\n",
    )


def test_the_shell_is_told_what_may_come_next():
    asked = {"_NSTF_COMPLETE": "complete_bash", "COMP_WORDS": "nstf in", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "nstf_convert"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["inspect"], "")


def test_formats_have_one_set_of_names(nstf, tiny, tmp_path):
    text = " ".join(nstf("convert", "--help").out.split())
    listed = text.partition("separated by commas: ")[2].partition(" (a low rank")[0].split(", ")
    from nstf_convert.pipeline.propose.methods import method_families

    with pytest.raises(ValueError, match="unknown format 'nonsense'; known are ") as error:
        method_families(["nonsense"])
    assert set(listed) == set(str(error.value).partition("known are ")[2].split(", ")) - {"dense"}
    assert method_families(listed) == method_families(["shuffle"]) | method_families(None)


def test_a_size_given_as_the_share_is_in_the_help(nstf):
    text = " ".join(nstf("convert", "--help").out.split())
    assert "a size such as 800MB is taken as --target-size" in text


def test_the_hint_after_a_conversion_fits_the_model(tmp_path):
    output = tmp_path / "m.nstf"
    assert next_step(output, {"accuracy": {"final": {"mean_kl": 0.1}}}).startswith("nstf generate")
    assert (
        next_step(output, {"accuracy": {"final": {"mean_cosine": 1.0}}})
        == f"nstf.runtime.load('{output}') in Python"
    )
    assert "load_tensors" in next_step(output, {"accuracy": None})


def test_the_hint_after_an_export_names_the_class(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert after_export(tmp_path) == f"transformers.LlamaForCausalLM.from_pretrained('{tmp_path}')"
    (tmp_path / "config.json").write_text("{}")
    assert "transformers.AutoModel.from_pretrained" in after_export(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "no config.json" in after_export(tmp_path)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"<!DOCTYPE html>\n<html></html>", "an HTML or XML page"),
        (b"\n  <?xml version='1.0'?>", "an HTML or XML page"),
        (b"GGUF\x03\0\0\0" + bytes(64), "a GGUF file"),
        (b"PK\x03\x04\x14\0\x08\x08" + bytes(64), "a zip archive, or a file of torch.save"),
        (b"\x08\x0a\x12\x04nstf:\xad\x78" + bytes(64), "an ONNX file"),
        (b"\x08\x08\x3a\xad\x78\x0a\x4f\x0a" + bytes(64), "an ONNX file"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "a pointer of Git LFS, which `git lfs pull` replaces with the file",
        ),
        (b"versions of it\n", "text"),
    ],
)
def test_a_file_of_another_kind_is_not_called_damaged(nstf, tmp_path, content, kind):
    path = tmp_path / "m.nstf"
    path.write_bytes(content)
    result = nstf("inspect", path)
    assert (result.code, result.err) == (
        6,
        f"error: {path}: not an .nstf or safetensors file: it looks like {kind}\n",
    )


def test_a_plain_safetensors_file_is_not_called_damaged(nstf, tmp_path):
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(2)}, tmp_path / "m.safetensors")
    result = nstf("inspect", tmp_path / "m.safetensors")
    assert result.code == 5 and "not an .nstf artifact" in result.err
    assert "damaged" not in result.err


def test_a_calibration_is_not_called_damaged(nstf, tmp_path):
    import torch

    from nstf_convert.pipeline.store.tensorfile import write_tensors

    path = tmp_path / "m.calibration"
    write_tensors(path, {"h": torch.zeros(2)}, {"kind": "calibration"})
    for command in ("inspect", "verify"):
        result = nstf(command, path)
        assert result.code == 6 and "a calibration or a stored result of a conversion" in result.err


def test_hints_quote_names_with_spaces(tmp_path):
    output = tmp_path / "a b.gguf"
    assert after_export(output, "gguf").startswith(f"llama-cli -m '{output}', or llama_cpp.Llama('{output}')")
    quoted = next_step(output, {"accuracy": {"final": {"mean_kl": 0.1}}})
    assert quoted == f"nstf generate '{output}' 'Once upon a time'"

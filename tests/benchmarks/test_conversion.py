"""benchmarks/conversion.py and what it stands on: models of random weights, sampling of a program, the table."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TEXT = "the quick brown fox jumps over the lazy dog and runs away from the wolf\n" * 20
SMALL_LLAMA = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
SMALL_MOE = SMALL_LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(autouse=True)
def benchmarks_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(
    ("name", "small"), [("8b", SMALL_LLAMA), ("135m", SMALL_LLAMA), ("30b-a3b-layers", SMALL_MOE)]
)
def test_a_model_of_random_weights_loads_as_its_architecture_and_gives_finite_logits(
    name: str, small: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import random_models

    from nstf_convert.checkpoint import open_checkpoint
    from nstf_convert.streamed import StreamedModel

    monkeypatch.setitem(random_models.CONFIGS, name, random_models.CONFIGS[name] | small)
    folder = random_models.make(name, tmp_path / "model", TEXT)
    with open_checkpoint(str(folder)) as checkpoint:
        model = StreamedModel.from_checkpoint(checkpoint)
        logits = model.logits(model.hidden(torch.arange(32)[None])[0])
        stored = sum(checkpoint.get(n).numel() for n in checkpoint.names())
    assert logits.shape == (32, 512)
    assert bool(torch.isfinite(logits).all())
    assert stored == random_models.parameters(random_models.CONFIGS[name])


def test_the_weights_are_the_same_in_shards_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import random_models
    from safetensors.torch import load_file

    config = random_models.CONFIGS["8b"] | SMALL_LLAMA
    found = []
    for size in (1 << 30, 1 << 16):
        folder = tmp_path / str(size)
        folder.mkdir()
        random_models.write_weights(config, folder, size)
        files = sorted(folder.glob("*.safetensors"))
        found.append({n: t for file in files for n, t in load_file(file).items()})
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}
    assert len(list((tmp_path / str(1 << 16)).glob("*.safetensors"))) > 1
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("name", "billions"), [("135m", 0.1345), ("1b", 1.236), ("8b", 8.03), ("70b-layers", 1.98)]
)
def test_the_shapes_have_the_published_numbers_of_parameters(name: str, billions: float) -> None:
    import random_models

    assert random_models.parameters(random_models.CONFIGS[name]) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc of Linux")
def test_memory_of_a_program_and_of_its_children_is_seen_and_files_are_told_apart(tmp_path: Path) -> None:
    import watch

    big = tmp_path / "big"
    big.write_bytes(b"x" * (80 << 20))
    child = "import time; b = bytearray(60 << 20); time.sleep(1.2)"
    code = (
        f"import mmap, subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', {child!r}]);"
        f"f = open({str(big)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ);"
        "b = bytearray(100 << 20); sum(m[::4096]); print('done'); print('heard', file=sys.stderr); c.wait()"
    )
    out, usage = watch.run([sys.executable, "-c", code])
    assert (out, usage.code) == ("done\n", 0), usage.lines
    assert [line for _, line in usage.lines] == ["heard"]
    assert usage.seconds > 1.2
    assert 0.0 < usage.processor_seconds < 60.0
    assert 160 << 20 < usage.anonymous_bytes < 240 << 20
    assert usage.file_bytes > 80 << 20
    assert usage.host_bytes > 240 << 20


def test_a_gpu_is_busy_in_the_spans_asked_for_and_idle_ones_do_not_count() -> None:
    import watch

    used = 1 << 30
    samples = [(1.0, 0, 0.0, used), (2.0, 0, 0.9, used), (2.5, 0, 0.7, used), (2.0, 1, 0.0, 0)]
    usage = watch.Usage(gpu=samples)
    assert usage.busy([(1.5, 3.0)]) == pytest.approx(0.8)
    assert usage.busy([(5.0, 6.0)]) is None
    assert usage.gpu_bytes == used
    assert watch.Usage().gpu_bytes is None


def test_stages_are_found_in_the_log_with_when_they_ran() -> None:
    from conversion import stage_spans

    lines = [
        (12.0, "calibration text: 1.5 s, peak memory 0.46 GiB"),
        (20.0, "encode: 4.0 s, peak memory 1.00 GiB"),
        (21.0, "mix: 2873993 bytes, score 3.8e-05"),
        (30.0, "encode: 2.0 s, peak memory 1.00 GiB"),
    ]
    assert stage_spans(lines) == {"calibration text": [(10.5, 12.0)], "encode": [(16.0, 20.0), (28.0, 30.0)]}


def test_the_table_has_a_row_a_conversion_and_its_longest_stages_first() -> None:
    import watch
    from conversion import by_layer, figures, table

    report = {
        "file": {"bits_per_weight": 3.0},
        "accuracy": {"final": {"mean_kl": 0.01}},
        "stages": [{"name": "open", "seconds": 1.0}, {"name": "encode", "seconds": 90.0}],
        "resources": {"predicted_seconds": 100.0, "predicted_host_bytes": 2_000_000_000},
    }
    usage = watch.Usage(seconds=130.0, host_bytes=1_500_000_000, anonymous_bytes=1_000_000_000)
    row = {"model": "m", "size": "bpw:3", "effort": "fast", "size_bytes": 5_000_000, **figures(report, usage)}
    lines = table([row]).splitlines()
    assert lines[2] == (
        "| m | fast | bpw:3 | 5.0 | 3.00 | 2 min 10 s | 100.0 s | 1.50 | 1.00 | 2.00 |  |  |  |  |  |  |"
    )
    assert lines[-1] == "m, fast, bpw:3: encode 90.0 s, open 1.0 s."
    assert by_layer(row["stages"], 2) == 45.0


def test_a_size_that_is_no_size_is_refused() -> None:
    from conversion import size_options

    assert size_options("bpw:3") == ["--target-bpw", "3"]
    for wrong in ("3", "bits:3", "bpw:"):
        with pytest.raises(SystemExit, match="bpw:N, share:N or bytes:N"):
            size_options(wrong)


def test_the_guard_fails_a_figure_that_is_worse_by_more_than_runs_differ_and_no_other() -> None:
    from guard import compare

    kept = {"0.5 KLD": 0.010, "0.5 time": 100.0, "tests": 50.0}
    found = {"0.5 KLD": 0.0104, "0.5 time": 131.0, "int4 decode": 9.0}
    assert compare(kept, found) == [
        ("0.5 KLD", 0.0104, 0.010, False), ("0.5 time", 131.0, 100.0, True), ("int4 decode", 9.0, None, False),
    ]  # fmt: skip


def test_the_guard_measures_what_the_engine_takes_beside_products_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = pytest.importorskip("guard")
    small = guard.SPEED_MODEL | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(guard, "SPEED_MODEL", small | {"intermediate_size": 256, "num_hidden_layers": 1})
    monkeypatch.setattr(guard, "ROUNDS", 2)
    found = guard.kernel_speeds(tmp_path)
    assert found.keys() == {"int4 prefill", "int4 decode"}
    assert all(0.0 < value < 1000.0 for value in found.values())
    assert all(guard.tolerance(name) > 1.0 for name in found)


def test_the_guard_says_which_figure_got_worse_and_fails_then_and_keeps_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = pytest.importorskip("guard")
    kept = tmp_path / "kept.json"
    figures = {"0.5 KLD": 0.01}
    monkeypatch.setattr(guard, "conversions", lambda folder: figures)
    given = ["guard.py", "--parts", "conversions", "--kept", str(kept)]
    monkeypatch.setattr(sys, "argv", [*given, "--keep"])
    guard.main()
    assert list(json.loads(kept.read_text()).values()) == [figures]
    figures["0.5 KLD"] = 0.02
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as stopped:
        guard.main()
    assert stopped.value.code == 1
    assert "x 2.000, WORSE" in capsys.readouterr().out

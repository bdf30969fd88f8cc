import errno
import importlib
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nstf.errors import BudgetError, CorruptError, UnsupportedError, UsageError
from nstf.runtime.artifact.atomic_file import appeared
from nstf_convert.cli.messages import explain

BUDGET = ("--budget", "0.5")
# Of the tiny model's file most is its header.
SIZE = ("--target-size", "100KiB")
FEW = ("--effort", "fast", "--samples", "4", "--seq-len", "16", "--device", "cpu")


def test_options_reach_the_pipeline(nstf, pipeline, tiny, tmp_path):
    out = tmp_path / "m.nstf"
    result = nstf("convert", tiny.folder, "--target-size", "1.5MiB", "-o", out, "--dataset", tiny.text, "--seed", 7,
                  "--samples", 9, "--seq-len", 64, "--formats", "int, grid,int", "--no-search", "--no-attention-plan",
                  "--fuse", "--threads", 2, "--work-dir", tmp_path / "work")  # fmt: skip
    assert result.code == 0, result.err
    o = pipeline.options
    assert (o.budget.kind, o.budget.value) == ("bytes", 1572864)
    assert (o.seed, o.samples, o.seq_len, o.formats) == (7, 9, 64, ("int", "grid"))
    assert (o.search, o.attention_plan, o.fuse, o.threads) == (False, False, True, 2)
    assert o.datasets == (str(tiny.text),) and o.work_dir == tmp_path / "work" and o.calibration is None
    assert f"wrote {out}" in result.out and "nstf inspect" in result.out


def test_json_is_the_only_thing_on_stdout(nstf, pipeline, tiny, tmp_path):
    pipeline.report = {"tool": {"name": "nstf", "command": ""}, "value": float("nan")}
    result = nstf("convert", tiny.folder, *BUDGET, "-o", tmp_path / "m.nstf", "--json")
    assert result.json["size_bytes"] == 8 and result.json["report"]["value"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no budget: give one of"),
        (("--budget", "-0.5"), "--budget '-0.5' is negative"),
        (("--budget", "zero"), "--budget 'zero' is not a number"),
        (("--target-size", "1.5XB"), "--target-size '1.5XB' is not a size"),
        (("--budget", "0.5", "--target-bpw", "4"), "--budget and --target-bpw exclude each other"),
        (("--budget", "0.5", "--formats", ","), "--formats: no format named"),
        (
            ("--budget", "0.5", "--dataset", "./missing.txt"),
            "--dataset: no such file or folder: ./missing.txt",
        ),
        (("--budget", "0.5", "--dataset", "missing.txt"), "--dataset: no such file: missing.txt"),
        (("--budget", "0.5", "--calibration", "missing"), "--calibration: no such file: missing"),
        (("--budget", "0.5", "--seed", "-1"), "invalid value for '--seed'"),
        (("--budget", "0.5", "--samples", "none"), "invalid value for '--samples'"),
        (("--budget", "0.5", "--report", "x.pdf"), "--report x.pdf: the name must end in .html or .json"),
        (("--budget", "0.5", "--report", "no/x.html"), "the folder no does not exist"),
        (("--budget", "0.5", "--frobnicate"), "no such option"),
        (("--budget", "0.5", "-o", "/dev/null/x.nstf"), "/dev/null is no folder: give another -o"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(nstf, pipeline, tiny, tmp_path, words, message):
    result = nstf("convert", tiny.folder, "-o", tmp_path / "m.nstf", *words)
    assert result.code == 2
    assert message.lower() in result.err.lower()
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    assert result.out == "" and pipeline.options is None


def test_a_missing_model_is_named(nstf, pipeline, tmp_path):
    result = nstf("convert", tmp_path / "nowhere", *BUDGET, "-o", tmp_path / "m.nstf")
    assert (result.code, result.err) == (2, f"error: no such file or folder: {tmp_path / 'nowhere'}\n")
    assert nstf("convert", "", *BUDGET, "-o", tmp_path / "m.nstf").code == 2


def test_without_an_output_the_file_is_named_after_the_model(nstf, pipeline, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = nstf("convert", tiny.folder, *BUDGET)
    assert result.code == 0
    assert "wrote model.nstf" in result.out


def test_paths_may_begin_in_a_home_folder_that_the_shell_left_alone(
    nstf, pipeline, tiny, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["--output=~/m.nstf", "--work-dir=~/w", "--report=~/r.json", "--budget", "0.5"]
    done = nstf("convert", tiny.folder, *words)
    assert done.code == 0, done.err
    assert pipeline.options.output == tmp_path / "m.nstf" and pipeline.options.work_dir == tmp_path / "w"
    assert (tmp_path / "r.json").is_file()
    (tmp_path / "w.txt").write_text("")
    done = nstf("convert", tiny.folder, "--output=~/n.nstf", "--work-dir=~/w.txt", "--budget", "0.5")
    assert done.code == 2 and f"--work-dir {tmp_path}/w.txt is a file" in done.err


def test_a_model_may_be_in_a_home_folder_that_the_shell_left_alone(
    nstf, pipeline, tiny, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(tiny.folder)
    done = nstf("convert", "~/model", "-o", tmp_path / "m.nstf", *BUDGET)
    assert done.code == 0, done.err
    assert pipeline.options.model == str(tmp_path / "model")
    done = nstf("diff", "~/model", "~/model")
    assert done.code == 0 and "relative error  0, over all values" in done.out, (done.out, done.err)
    done = nstf("convert", "~nobody-of-this-name/model", *BUDGET)
    assert done.code == 2 and "there is no such user's home folder" in done.err


def test_a_dataset_may_be_in_a_home_folder_that_the_shell_left_alone(
    nstf, pipeline, tiny, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "texts").mkdir()
    done = nstf("convert", tiny.folder, "-o", tmp_path / "m.nstf", *BUDGET, "--dataset=~/texts")
    assert done.code == 0, done.err
    assert pipeline.options.datasets == (str(tmp_path / "texts"),)
    done = nstf("convert", tiny.folder, "-o", tmp_path / "n.nstf", *BUDGET, "--dataset=~/none.txt")
    assert done.code == 2 and "--dataset: no such file or folder: ~/none.txt" in done.err


def test_a_place_that_takes_no_file_is_said_before_the_work(nstf, pipeline, tiny, tmp_path, monkeypatch):
    pipe = tmp_path / "a.json"
    os.mkfifo(pipe)
    for words in (["-o", pipe], ["-o", tmp_path / "a.nstf", "--report", pipe]):
        found = nstf("convert", tiny.folder, *BUDGET, *words, "--force")
        assert found.code == 2 and "a pipe" in found.err and pipeline.options is None
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    found = nstf("convert", tiny.folder, *BUDGET, "-o", tmp_path / "a.nstf")
    assert found.code == 2 and "cannot be written into" in found.err and pipeline.options is None


def test_a_link_to_itself_is_wrong_use(nstf, pipeline, tiny, tmp_path):
    loop = tmp_path / "loop.nstf"
    loop.symlink_to(loop)
    found = nstf("verify", loop)
    assert found.code == 2 and found.err.count("\n") == 1
    code, said = explain(RuntimeError(f"Symlink loop from '{loop}'"), ())
    assert code == 2 and "--debug" not in said


@pytest.mark.parametrize(
    "words",
    [["x" * 20_000], ["verify", "x/" * 3_000], ["verify", "x" * 100_000], ["verify", "--" + "x" * 9_000]],
)
def test_what_was_typed_makes_no_message_longer_than_a_file_does(nstf, words):
    found = nstf(*words)
    assert found.code == 2 and found.err.count("\n") == 1 and len(found.err) < 4_100


def test_a_current_folder_that_was_removed_is_wrong_use(nstf, tiny, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    found = nstf("convert", tiny.folder, *BUDGET, "-o", "m.nstf")
    assert (
        found.code == 2
        and found.err == "error: the current folder was removed: change to one that is there\n"
    )


def test_the_output_is_never_lost_by_accident(nstf, pipeline, tiny, tmp_path):
    out = tmp_path / "m.nstf"
    out.write_bytes(b"old")
    result = nstf("convert", tiny.folder, *BUDGET, "-o", out)
    assert (
        result.code == 2
        and "exists: give another name, or --force" in result.err
        and out.read_bytes() == b"old"
    )
    assert nstf("convert", tiny.folder, *BUDGET, "-o", out, "--force").code == 0
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"x")
    assert "is the input" in nstf("convert", gguf, *BUDGET, "-o", gguf, "--force").err
    assert "is a folder" in nstf("convert", tiny.folder, *BUDGET, "-o", tmp_path).err
    # A file of that name was written, without the slash.
    assert "new/ is a folder" in nstf("convert", tiny.folder, *BUDGET, "-o", f"{tmp_path}/new/").err
    assert "does not exist" in nstf("convert", tiny.folder, *BUDGET, "-o", tmp_path / "a" / "m.nstf").err


@pytest.mark.parametrize("name", ["model.safetensors", "x.gguf", "pytorch_model.bin", "m.onnx"])
def test_a_name_that_other_tools_would_load_wrongly_is_refused(nstf, pipeline, tiny, tmp_path, name):
    result = nstf("convert", tiny.folder, *BUDGET, "-o", tmp_path / name)
    assert result.code == 2 and "would be taken for a" in result.err and ".nstf" in result.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            BudgetError("budget 1000 bytes: the smallest file is 5000 bytes", 5000),
            3,
            "smallest file is 5000 bytes",
        ),
        (CorruptError("shard 2 is truncated"), 5, "shard 2 is truncated"),
        (UnsupportedError("unknown architecture 'X'"), 6, "unknown architecture"),
        (UsageError("a\nb\x1b[31m"), 2, "a b\\x1b[31m"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/m.nstf"),
            1,
            "no space left on the disk: /x/m.nstf",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "Permission denied: /x"),
        (MemoryError(), 1, "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1, "out of memory"),
        (ZeroDivisionError("oops"), 1, "ZeroDivisionError: oops; run again with --debug for the traceback"),
        (KeyboardInterrupt(), 130, "interrupted; run the same command again"),
    ],
)
def test_every_failure_is_one_line_with_its_exit_code(nstf, pipeline, tiny, tmp_path, error, code, message):
    pipeline.error = error
    result = nstf("convert", tiny.folder, *BUDGET, "-o", tmp_path / "m.nstf")
    assert result.code == code and message in result.err
    assert result.err.count("\n") == 1 and "Traceback" not in result.err


TAKEN = ValueError("could not determine the shape of object type 'torch.storage.UntypedStorage'")
GOES_ON = "interrupted; run the same command again and it goes on where it stopped"


@pytest.mark.parametrize(
    ("command", "where", "error", "code", "message"),
    [
        ("convert", "nstf_convert.pipeline.convert", TAKEN, 130, GOES_ON),
        ("convert", "nstf_convert.pipeline.convert", BudgetError("too small", 7), 3, "too small"),
        ("diff", "nstf_convert.gates.difference.compare_sides", TAKEN, 130, "interrupted"),
        ("export", "nstf_convert.export.export", TAKEN, 130, "interrupted"),
    ],
)
def test_an_interruption_that_a_library_took_for_something_else(
    nstf, tiny, tmp_path, monkeypatch, command, where, error, code, message
):
    def work(*_: Any) -> Any:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise error

    monkeypatch.setattr(where, work)
    words = {
        "convert": [tiny.folder, *BUDGET, "-o", tmp_path / "m.nstf"],
        "diff": [tiny.same, tiny.coarse],
        "export": [tiny.same, "-o", tmp_path / "x"],
    }
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = nstf(command, *words[command])
        after = signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler
    assert (result.code, result.err) == (code, f"error: {message}\n")


@pytest.mark.parametrize(
    ("error", "words", "hint"),
    [
        (MemoryError(), ["convert"], "fewer --samples or a shorter --seq-len need less"),
        (MemoryError(), ["plan", "--calibration", "c"], "a smaller --memory plans for less"),
        (MemoryError(), ["generate"], "free some, raise its limit, or give fewer --max-new-tokens"),
        (MemoryError(), ["export"], "free some, or raise its limit"),
        (RuntimeError("can't start new thread"), ["convert"], "raise the limit on threads or memory"),
        (RuntimeError("can't start new thread"), ["serve"], "raise the limit on threads or memory"),
    ],
)
def test_what_needs_less_memory_is_said_in_options_that_the_command_has(error, words, hint):
    code, message = explain(error, words)
    assert code == 1 and message.startswith("out of memory: ") and message.endswith(f"; {hint}")


def test_what_needs_less_memory_of_a_gpu_is_said_in_options_that_the_command_has() -> None:
    import typer

    from nstf_convert.cli import SUMMARIES, application

    error = type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")
    commands: Any = typer.main.get_command(application())
    for name in SUMMARIES:
        code, message = explain(error, [name])
        assert code == 1 and message.startswith("the GPU has too little memory: ")
        if name in ("eval", "diff", "export", "inspect", "verify", "compile", "place"):
            continue  # on a CPU alone
        known = {option for p in commands.commands[name].params for option in p.opts}
        assert {w.strip(",") for w in message.split() if w.startswith("--")} <= known, name


def test_debug_shows_the_traceback_and_still_ends_with_the_line(nstf, pipeline, tiny, tmp_path):
    pipeline.error = ZeroDivisionError("oops")
    result = nstf("convert", tiny.folder, *BUDGET, "-o", tmp_path / "m.nstf", "--debug")
    assert result.code == 1 and "Traceback" in result.err
    assert result.err.splitlines()[-1].startswith("error: ZeroDivisionError")


def test_reports_are_written_as_page_and_as_json(nstf, pipeline, tiny, tmp_path, report):
    pipeline.report = report
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    out = tmp_path / "m.nstf"
    result = nstf("convert", tiny.folder, *BUDGET, "-o", out, "--report", page, "--report", data)
    assert result.code == 0, result.err
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(data.read_text())["version"] == 1
    assert (
        "mean KLD" in result.out
        and "where the bytes went" in result.out
        and "best uniform file" in result.out
    )
    again = nstf("convert", tiny.folder, *BUDGET, "-o", out, "--report", page)
    assert again.code == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.nstf", "r.html", "r.json"]


def test_a_report_that_appears_meanwhile_stays(nstf, pipeline, tiny, tmp_path, report, monkeypatch):
    """It was replaced without --force; the artifact and the other report are there all the same."""
    pipeline.report = report
    out, mine, data = tmp_path / "m.nstf", tmp_path / "mine.json", tmp_path / "r.json"

    def late(options, done):
        mine.write_text("a list of mine")
        return pipeline.convert(options, done)

    monkeypatch.setattr("nstf_convert.pipeline.convert", late)
    words = ("convert", tiny.folder, *BUDGET, "-o", out, "--report", mine, "--report", data)
    words += ("--report", tmp_path / ".." / tmp_path.name / "r.json")  # the same again
    result = nstf(*words)
    assert result.code == 1 and "mine.json was written by something else meanwhile, and stays" in result.err
    assert mine.read_text() == "a list of mine" and "tool" in json.loads(data.read_text())
    assert result.out.count("report: ") == 1 and "r.json" in result.out
    assert nstf(*words, "--force").code == 0 and "tool" in json.loads(mine.read_text())


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "full"), 1, "no space left on the disk"),
    ],
)
def test_what_fails_when_the_file_has_its_name_says_that_it_is_complete(
    nstf, pipeline, tiny, tmp_path, report, monkeypatch, error, code, said
):
    """ "Run the same command again" ended with "it exists", and the work directory was gone: the report was lost."""
    pipeline.report = report
    out, page = tmp_path / "m.nstf", tmp_path / "r.json"
    kept = []

    def fails(path, data):
        kept.append(out.exists())
        raise error

    words = ("convert", tiny.folder, *BUDGET, "-o", out, "--report", page)
    with monkeypatch.context() as patched:
        patched.setattr("nstf_convert.cli.convert.write_report", fails)
        result = nstf(*words)
    assert result.code == code and result.err.count("\n") == 1 and kept == [True]
    assert (
        said in result.err
        and "m.nstf is complete, its report is not: the same command with --force" in result.err
    )
    assert nstf(*words, "--force").code == 0 and page.exists()


@pytest.mark.parametrize("meanwhile", ["gone", "a folder", "another's"])
def test_what_something_else_made_of_the_name_is_not_called_complete(
    nstf, tiny, tmp_path, monkeypatch, meanwhile
):
    """It was, though there was no such file, or another's, which `--force` would have replaced."""
    out = tmp_path / "m.nstf"
    out.write_bytes(b"older")

    def convert(options, done):
        out.unlink()
        if meanwhile == "a folder":
            out.mkdir()
        if meanwhile == "another's":
            out.write_bytes(b"theirs")
            raise appeared(out)
        raise KeyboardInterrupt

    monkeypatch.setattr("nstf_convert.pipeline.convert", convert)
    result = nstf("convert", tiny.folder, *BUDGET, "-o", out, "--force")
    assert result.code == (1 if meanwhile == "another's" else 130) and "complete" not in result.err


def test_reports_are_written_while_the_work_directory_is_there(tiny, tmp_path):
    from nstf_convert import pipeline
    from nstf_convert.budget import Budget
    from nstf_convert.options import ConvertOptions

    seen = []

    def done(result):
        seen.append((result.output.exists(), [p.name for p in tmp_path.glob("*.work")]))
        raise KeyboardInterrupt

    chosen = ConvertOptions(
        str(tiny.folder), tmp_path / "m.nstf", Budget("bytes", 100 << 10), samples=4, seq_len=16, device="cpu",
        datasets=(str(tiny.text),), effort="fast",
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        pipeline.convert(chosen, done)
    assert seen == [(True, ["m.nstf.work"])] and (tmp_path / "m.nstf.work").is_dir()


def test_a_report_in_the_work_directory_is_refused(nstf, tiny, tmp_path):
    """That goes at the end: the folder was missing after all the work."""
    out = tmp_path / "m.nstf"
    (tmp_path / "m.nstf.work").mkdir()
    result = nstf("convert", tiny.folder, *BUDGET, "-o", out, "--report", tmp_path / "m.nstf.work" / "r.json")
    assert result.code == 2 and "lies in the work directory, which goes at the end" in result.err


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_report_takes_the_place_of_no_link_to_nothing(
    nstf, pipeline, tiny, tmp_path, report, monkeypatch, when
):
    pipeline.report = report
    link = tmp_path / "r.json"

    def late(options, done):
        link.symlink_to("nowhere")
        return pipeline.convert(options, done)

    if when == "before":
        link.symlink_to("nowhere")
    else:
        monkeypatch.setattr("nstf_convert.pipeline.convert", late)
    result = nstf("convert", tiny.folder, *BUDGET, "-o", tmp_path / "m.nstf", "--report", link)
    assert result.code == (2 if when == "before" else 1) and link.is_symlink()


def test_the_page_gets_the_roofline_of_the_finished_file(nstf, pipeline, tiny, tmp_path, report):
    pipeline.report, pipeline.content = report, tiny.coarse.read_bytes()
    for name, words in (("a", ()), ("b", ("--no-profile",))):
        page = tmp_path / f"{name}.html"
        result = nstf(
            "convert", tiny.folder, *BUDGET, "-o", tmp_path / f"{name}.nstf", "--report", page, *words
        )
        assert result.code == 0, result.err
        assert ("<h2>Roofline</h2>" in page.read_text()) == (name == "a")


def test_a_result_that_cannot_be_timed_is_still_a_result(nstf, pipeline, tiny, tmp_path, report):
    pipeline.report = report
    result = nstf("convert", tiny.folder, *BUDGET, "-o", tmp_path / "m.nstf", "--report", tmp_path / "r.html")
    assert result.code == 0 and "the report has no roofline: UnsupportedError" in result.err


def test_calibrate_writes_its_file_and_says_what_is_next(nstf, pipeline, tiny, tmp_path):
    out = tmp_path / "m.calibration"
    result = nstf("calibrate", tiny.folder, "-o", out, "--dataset", tiny.text)
    assert result.code == 0 and f"--calibration {out}" in result.out
    assert nstf("calibrate", tiny.folder, "-o", out, "--force", "--json").json["size_bytes"] == 10
    assert nstf("calibrate", tiny.folder, "-o", out).code == 2


def test_plan_prints_every_tensor_and_writes_nothing(nstf, pipeline, tiny, report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipeline.report = report
    result = nstf("plan", tiny.folder, *BUDGET)
    assert result.code == 0, result.err
    assert "model.layers.0.self_attn.q_proj.weight" in result.out and "expected loss" in result.out
    assert len(nstf("plan", tiny.folder, *BUDGET, "--json").json["tensors"]) == len(report["tensors"])
    assert list(tmp_path.iterdir()) == []
    assert "plan with a size" in nstf("plan", tiny.folder, "--max-kl", "0.1").err


def test_a_plan_leaves_what_an_interrupted_conversion_has_kept(nstf, tiny, tmp_path, monkeypatch):
    module = importlib.import_module("nstf_convert.pipeline.convert")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_choose", interrupted)
        assert (
            nstf("convert", tiny.folder, *SIZE, *FEW, "--dataset", tiny.text, "-o", "model.nstf").code == 130
        )
    kept = {file: file.stat().st_mtime_ns for file in Path("model.nstf.work").rglob("*") if file.is_file()}
    assert len(kept) > 2
    for words in (SIZE, (*SIZE, "--seed", "7"), ("--frontier",)):
        shown = nstf("plan", tiny.folder, *FEW, "--dataset", tiny.text, *words)
        assert shown.code == 0, shown.err
        assert kept == {f: f.stat().st_mtime_ns for f in Path("model.nstf.work").rglob("*") if f.is_file()}
        assert [entry.name for entry in tmp_path.iterdir()] == ["model.nstf.work"]


def test_a_plan_that_was_interrupted_goes_on_and_keeps_no_other_from_its_work(
    nstf, tiny, tmp_path, monkeypatch
):
    module = importlib.import_module("nstf_convert.pipeline.convert")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "worth_structure", interrupted)
        assert nstf("plan", tiny.folder, *SIZE, *FEW, "--dataset", tiny.text).code == 130
    (left,) = tmp_path.iterdir()
    assert (left / "calibration.safetensors").exists()
    assert nstf("plan", tiny.folder, *SIZE, *FEW, "--dataset", tiny.text, "--seed", "7").code == 0
    assert [*tmp_path.iterdir()] == [left]
    assert nstf("plan", tiny.folder, *SIZE, *FEW, "--dataset", tiny.text).code == 0
    assert not [*tmp_path.iterdir()]


def test_a_plan_can_discard_what_a_work_directory_of_its_own_holds(nstf, tiny, tmp_path):
    words = ("plan", tiny.folder, *SIZE, *FEW, "--dataset", tiny.text, "--work-dir", tmp_path / "w")
    assert nstf(*words).code == 0
    other = nstf(*words, "--seed", "7")
    assert other.code == 2 and "seed was 0, now 7" in other.err and "--restart" in other.err
    assert nstf(*words, "--seed", "7", "--restart").code == 0


@pytest.fixture
def report():
    """A small but complete report."""
    from nstf.kernels.formats import Node, integer
    from nstf_convert.report import build as r

    tree = Node("int", integer.Params(bits=4))
    name = "model.layers.0.self_attn.q_proj.weight"
    rows = [r.TensorReport(name, "q", (64, 64), "bfloat16", tree, 8192, 0.25, True)]
    kl = {"mean_kl": 0.01, "mean_kl_se": 0.001, "median_kl": 0.001, "p99_kl": 0.1, "top1": 0.9, "top1_se": None,
          "ppl": 5.0, "ppl_reference": 4.9, "ppl_ratio": 1.02, "windows": 16, "tokens": 4080}  # fmt: skip
    return r.build(
        model=r.ModelFacts("m", "LlamaForCausalLM", "safetensors", "ab", 4096, 8192, 1),
        budget={"kind": "ratio", "value": 0.5, "bytes": 4096}, size_bytes=3000, tensors=rows,
        accuracy=r.AccuracyFacts(kl, uniform=r.Uniform("int4 g64", 2900, kl)),
        stages=[r.Stage("plan", 1.5, 1 << 30)],
    )  # fmt: skip

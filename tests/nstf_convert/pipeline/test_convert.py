"""The whole pipeline on a small model: what it promises, each as a sentence."""

import json
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nstf_convert
from nstf.errors import BudgetError, UsageError
from nstf.kernels.formats import decode
from nstf.runtime.artifact import open_artifact, verify
from nstf_convert.pipeline import calibrate, convert, plan
from nstf_convert.pipeline.calibrate.statistics import domains, report_batches
from nstf_convert.pipeline.improve.run import Run
from nstf_convert.pipeline.outcome import Planned
from nstf_convert.pipeline.store.tensorfile import TensorFile

from .conftest import assert_not_worse_than_one_format, make_llama


@pytest.mark.parametrize(
    "ratio", [0.45, pytest.param(0.6, marks=pytest.mark.slow), pytest.param(0.85, marks=pytest.mark.slow)]
)
def test_file_is_never_larger_than_the_budget_and_verifies(options, ratio) -> None:
    result = convert(options(("ratio", ratio)))
    assert result.output.stat().st_size == result.size_bytes <= result.budget_bytes
    assert verify(result.output).size_bytes == result.size_bytes
    # The last bytes are spent too: one more bit per weight of the smallest tensor would not fit.
    assert result.size_bytes > 0.9 * result.budget_bytes


def test_a_default_conversion_encodes_front_to_back_in_every_format_and_keeps_its_budget(converted) -> None:
    result = converted.result
    assert verify(result.output).size_bytes == result.size_bytes <= result.budget_bytes
    assert any("trellis" in t["encoding"] for t in result.report["tensors"])
    stages = {stage["name"] for stage in result.report["stages"]}
    assert "encode front to back" in stages and "search" not in stages


def test_the_mix_is_never_worse_than_the_best_uniform_file(converted, quick) -> None:
    assert_not_worse_than_one_format(converted.result.report["accuracy"])
    report = quick.result.report["accuracy"]
    assert report["uniform"] is not None and report["stopped"] == []
    assert report["final"]["mean_kl"] <= report["uniform"]["accuracy"]["mean_kl"]


def test_measured_accuracy_is_inside_the_file_and_is_what_the_runtime_gives(converted, small) -> None:
    import nstf.runtime
    from nstf_convert.checkpoint import open_checkpoint
    from nstf_convert.measure import score_window, summarise
    from nstf_convert.streamed import StreamedModel

    output = converted.result.output
    with open_artifact(output) as artifact:
        stored = artifact.manifest.report["accuracy"]["final"]["mean_kl"]
    model = nstf.runtime.load(output, dtype=torch.float32)
    reference = StreamedModel.from_checkpoint(open_checkpoint(small.folder))
    scores = []
    with torch.no_grad():
        for batch in report_batches(TensorFile(converted.work / "calibration.safetensors")):
            ids = batch["input_ids"]
            hidden = model.model(ids).last_hidden_state[0]
            test = type("Test", (), {"logits": staticmethod(model.lm_head)})
            scores.append(score_window(reference, reference.hidden(ids)[0], test, hidden, ids[0]))
    assert summarise(scores).mean_kl == pytest.approx(stored, rel=2e-3)


def test_impossible_budget_names_the_smallest_size_and_leaves_no_file(options) -> None:
    with pytest.raises(BudgetError, match="cannot be met: the smallest file is") as caught:
        convert(options(("bytes", 20_000)))
    assert not options().output.exists()
    assert caught.value.exit_code == 3
    smallest = caught.value.smallest_bytes
    assert convert(options(("bytes", smallest))).size_bytes <= smallest
    with pytest.raises(BudgetError):
        convert(options(("bytes", smallest - 1), force=True))


def test_a_model_is_converted_from_python(small, tmp_path) -> None:
    result = nstf_convert.convert(
        small.folder, budget=0.9, dataset=small.text, output=tmp_path / "m.nstf", effort="fast", samples=4,
        seq_len=24, formats=("int_grid",), device="cpu", threads=1,
    )  # fmt: skip
    assert result.output.exists() and result.size_bytes <= result.budget_bytes
    assert result.report["resources"]["effort"] == "fast"


def test_tied_table_is_stored_once_and_quantised(converted) -> None:
    with open_artifact(converted.result.output) as artifact:
        assert artifact.stored_name("lm_head.weight") == "model.embed_tokens.weight"
        record = artifact.record("model.embed_tokens.weight")
        assert record.tree.kind != "dense"
        assert torch.equal(
            decode(artifact.encoded("lm_head.weight")), decode(artifact.encoded("model.embed_tokens.weight"))
        )


def test_second_budget_reuses_the_work_directory(converted, copied_work, options, tmp_path) -> None:
    assert "calibration" in {stage["name"] for stage in converted.result.report["stages"]}
    second = convert(options(("ratio", 0.6), work_dir=copied_work, output=tmp_path / "b.nstf"))
    assert "calibration" not in {stage["name"] for stage in second.report["stages"]}
    fresh = convert(options(("ratio", 0.6), work_dir=tmp_path / "other", output=tmp_path / "c.nstf"))
    assert (tmp_path / "b.nstf").read_bytes() == (tmp_path / "c.nstf").read_bytes()
    assert second.size_bytes == fresh.size_bytes


def test_work_directory_of_another_job_is_refused_with_what_differs(options, copied_work) -> None:
    with pytest.raises(UsageError, match=r"another job \(seed was 0, now 1\)"):
        convert(options(work_dir=copied_work, seed=1))


def test_whatever_part_of_the_job_differs_the_work_directory_is_refused_and_stays(
    options, copied_work
) -> None:
    """Input, texts, versions, device, threads: each of the results depends on them."""
    file = copied_work / "job.json"
    job = json.loads(file.read_text())
    parts = [part for part in job if part != "names"]
    assert len(parts) >= 12
    for part in parts:
        file.write_text(json.dumps(job | {part: "another"}))
        with pytest.raises(UsageError, match=rf'{part}(:| was "another", now )'):
            convert(options(work_dir=copied_work))
    file.write_text(json.dumps(job))
    convert(options(work_dir=copied_work))


def test_default_work_directory_is_removed_after_success(quick) -> None:
    assert sorted(p.name for p in quick.result.output.parent.iterdir()) == ["out.nstf"]


def test_fused_tensors_get_one_format(options) -> None:
    result = convert(options(("ratio", 0.55), fuse=True))
    by_name = {t["name"]: t["encoding"] for t in result.report["tensors"]}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        assert len({by_name[f"{prefix}self_attn.{n}_proj.weight"] for n in "qkv"}) == 1
        assert len({by_name[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up")}) == 1


def test_max_kl_gives_the_smallest_file_found_within_the_bound(options, quick) -> None:
    found = convert(options(("max_kl", 0.05)))
    within = quick.result.report["accuracy"]["final"]["mean_kl"]
    assert within < found.report["accuracy"]["final"]["mean_kl"] <= 0.05
    assert found.size_bytes < quick.result.size_bytes


def test_plan_predicts_and_writes_nothing(options) -> None:
    report = plan(options(("ratio", 0.5)))
    assert report["accuracy"]["final"] is None
    assert report["file"]["size_bytes"] <= report["budget"]["bytes"]
    assert all(t["expected_loss"] is not None for t in report["tensors"] if not t["note"])
    assert not options().output.exists()


def test_a_plan_leaves_the_decompositions_that_a_conversion_would_leave(options, monkeypatch) -> None:
    def left(run: Run, planned: Planned, budget_bytes: int) -> tuple[Planned, None]:
        return replace(planned, mix=run.without_structure(budget_bytes // 2).mix), None

    half = plan(options(("ratio", 0.35)))
    monkeypatch.setattr(sys.modules[plan.__module__], "worth_structure", left)
    found = plan(options(("ratio", 0.7)))
    assert [t["encoding"] for t in found["tensors"]] == [t["encoding"] for t in half["tensors"]]


def test_rejected_alternatives_and_priced_families_are_in_the_report(options, copied_work) -> None:
    report = convert(options(("ratio", 0.35), work_dir=copied_work)).report
    row = next(t for t in report["tensors"] if t["name"].endswith("layers.0.mlp.gate_proj.weight"))
    words = " ".join(r["encoding"] for r in row["rejected"])
    assert "int2" in words
    low_rank = next(f for f in report["families"] if f["family"] == "SVD")
    assert low_rank["ruled_out"] > 0 and low_rank["bound_ratio"] >= 1, "of random weights no low rank may win"
    json.dumps(report, allow_nan=False)


def test_without_a_dataset_the_text_is_documentation_code_and_prose(options, tmp_path) -> None:
    model = Path(__file__).parents[3] / "examples" / "tiny_llama" / "model"
    file = TensorFile(calibrate(options(model=str(model), datasets=(), output=tmp_path / "calibration")))
    assert file.metadata["source"]["origin"] == "mixed"
    for split in ("fit", "held_out", "report"):
        assert set(domains(file, split)) == {"documentation", "code", "prose"}


def test_without_a_dataset_and_a_tokenizer_the_model_writes_its_own_text(options, small, tmp_path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(small.folder, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    facts = plan(options(model=str(folder), datasets=()))["calibration"]
    assert facts["self_generated"]
    assert facts["source"] == "sampled from the model itself"


def test_an_unknown_architecture_is_converted_tensor_by_tensor(options, small, tmp_path) -> None:
    from nstf.runtime import load_tensors

    folder = tmp_path / "unknown"
    shutil.copytree(small.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "martian", "architectures": ["MartianForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    result = convert(options(("ratio", 0.6), model=str(folder), datasets=()))
    assert result.size_bytes <= result.budget_bytes
    assert result.report["accuracy"]["final"] is None
    tensors = load_tensors(result.output)
    assert tensors["model.layers.0.mlp.up_proj.weight"].shape == (96, 64)


def test_existing_output_is_refused_without_force(options) -> None:
    options().output.write_bytes(b"precious")
    with pytest.raises(UsageError, match="exists: give another output, or force"):
        convert(options())
    assert options().output.read_bytes() == b"precious"


def test_calibration_of_another_model_is_refused(options, converted, tmp_path) -> None:
    path = converted.work / "calibration.safetensors"
    result = convert(options(calibration=path, datasets=()))
    assert result.report["calibration"]["source"] == "text.txt"
    make_llama(tmp_path / "other", torch.float16)
    with pytest.raises(UsageError, match="belongs to another model"):
        convert(options(calibration=path, force=True, model=str(tmp_path / "other")))


def test_calibration_of_another_tokenizer_is_refused(options, converted, tmp_path) -> None:
    """Its statistics are those of other tokens; the weights and the config are the same."""
    path, chosen = converted.work / "calibration.safetensors", options(datasets=())
    other = shutil.copytree(chosen.model, tmp_path / "other")
    words = json.loads((other / "tokenizer.json").read_text())
    (other / "chat_template.jinja").write_text("{{ messages }}")  # changes no tokens
    assert convert(options(calibration=path, datasets=(), model=str(other))).size_bytes
    (other / "tokenizer.json").write_text(json.dumps(words, indent=7))
    with pytest.raises(UsageError, match="made with other files of a tokenizer or processor: run `nstf cal"):
        convert(options(calibration=path, datasets=(), model=str(other), force=True))


def test_a_process_forked_from_one_that_has_converted_converts_the_same(options) -> None:
    """It has none of the threads that torch had there, and waited for them without end."""
    chosen = options(threads=2)
    before = convert(chosen).output.read_bytes()
    child = os.fork()
    if child == 0:
        other = 1
        try:
            signal.alarm(60)
            other = convert(replace(chosen, force=True)).output.read_bytes() != before
        finally:
            os._exit(int(other))
    assert os.waitpid(child, 0)[1] == 0


def test_conversions_of_several_threads_give_the_bytes_of_one(options, quick, tmp_path) -> None:
    """They changed each other's precision of products, and left the process with theirs."""
    torch.set_float32_matmul_precision("medium")
    try:
        outputs = [tmp_path / f"{i}.nstf" for i in range(2)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda output: convert(options(output=output)), outputs))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert [output.read_bytes() == quick.content for output in outputs] == [True, True]

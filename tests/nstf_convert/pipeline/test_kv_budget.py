"""`--kv-budget` and `--context` from end to end, on a small model."""

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nstf.errors import BudgetError, CorruptError, UnsupportedError, UsageError
from nstf.runtime.artifact import open_artifact
from nstf.runtime.attention_plan import parse_plan
from nstf.runtime.kv_formats import cache_bytes, dense_bytes
from nstf_convert.cli.attention import chosen_pairs, kv_pairs, kv_summary
from nstf_convert.cli.sizes import format_bytes
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline import calibrate, convert
from nstf_convert.pipeline.attention import plan as attention_plan
from nstf_convert.pipeline.attention import possible
from nstf_convert.pipeline.calibrate import make
from nstf_convert.pipeline.calibrate.checked import check_given
from nstf_convert.pipeline.store.tensorfile import TensorFile, write_tensors

from .conftest import WORDS, make_llama

Make = Callable[..., ConvertOptions]


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The small model with positions for 1024 tokens, and a text of one long document."""
    root = tmp_path_factory.mktemp("long")
    make_llama(root / "model")
    config = root / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 1024}))
    rng = random.Random(1)
    text = root / "long.txt"
    text.write_text(" ".join(rng.choice(WORDS) for _ in range(3000)))
    return {
        "model": str(root / "model"),
        "datasets": (str(text),),
        "attention_plan": None,
        "effort": "fast",
        "formats": ("int",),
    }


def test_a_file_holds_a_plan_within_the_budget(options: Make, long: dict[str, Any]) -> None:
    chosen = options(**long, kv_budget=0.6, context=512)
    report = convert(chosen).report["attention"]
    with open_artifact(chosen.output) as artifact:
        stored = dict(artifact.manifest.attention)
    plan = parse_plan(stored)
    assert (plan.context, plan.kv_budget, plan.kld.allowed) == (512, 0.6, None)
    assert cache_bytes(plan, 512) <= 0.6 * dense_bytes(plan, 512)
    assert plan.kld.choose is not None and plan.kld.report is not None and plan.kld.report > 0
    assert [n.length for n in plan.lengths] == [256, 512]
    assert plan.lengths[-1].passkey is not None and plan.lengths[-1].needles is not None
    assert report["choice"]["share"] <= 0.6 and len(report["choice"]["rivals"]) == 2
    assert report["choice"]["contexts"] == {"choose": ["long.txt"], "report": ["long.txt"]}
    lines = dict(kv_pairs(kv_summary(stored)))
    assert lines["KV cache"] == (
        f"{cache_bytes(plan, 512)} bytes ({format_bytes(cache_bytes(plan, 512))}) at 512 tokens, "
        f"{cache_bytes(plan, 512) / dense_bytes(plan, 512):.3f} of dense 16 bits"
    )
    assert str(lines["layer 1"]).startswith(f"{kv_summary(stored)['layers'][1]['size_bytes']} bytes: ")
    assert str(lines["at 512 tokens"]).startswith("KLD ")
    told = dict(chosen_pairs(report))
    assert told["KV cache"] == lines["KV cache"]
    assert sum(name.startswith("all groups keys") for name in told) == 2


def test_a_calibration_brings_its_profile_along(
    options: Make, long: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    real = attention_plan.TensorFileWriter
    monkeypatch.setattr(attention_plan, "TensorFileWriter", lambda path: real(written.append(path) or path))
    path = calibrate(options(**long, context=512, output=tmp_path / "made.calibration"))
    # In the work directory: beside the output nobody would find what a kill leaves.
    assert [p.parent.name for p in written] == ["made.calibration.work"]
    given = options(**{**long, "datasets": ()}, calibration=path, kv_max_kl=1e5, output=tmp_path / "a.nstf")
    report = convert(given).report["attention"]
    assert report["context"] == 512 and report["kld"]["allowed"] == 1e5
    assert report["choice"]["share"] < 0.6
    with pytest.raises(UsageError, match=r"is for 512 tokens: run `nstf calibrate .* --context 256`"):
        convert(replace(given, context=256, output=tmp_path / "b.nstf"))
    plain = calibrate(options(**long, output=tmp_path / "plain.calibration"))
    with pytest.raises(UsageError, match="has no attention profile: run `nstf calibrate"):
        convert(replace(given, calibration=plain, output=tmp_path / "c.nstf"))


def test_a_profile_that_nobody_writes_is_refused(
    options: Make, long: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = calibrate(options(**long, context=512, output=tmp_path / "made.calibration"))
    seen: list[Any] = []
    monkeypatch.setattr(make, "check_given", lambda *known: seen.extend(known))
    convert(options(**{**long, "datasets": ()}, calibration=path, output=tmp_path / "a.nstf"))
    file, model, units = seen
    check_given(file, model, units)
    tensors = {n: file.get(n) for n in file.names()}

    def accepted(facts: dict[str, Any], tensors: dict[str, Any]) -> bool:
        write_tensors(tmp_path / "bad", tensors, {**file.metadata, "attention": facts})
        try:
            check_given(TensorFile(tmp_path / "bad"), model, units)
        except CorruptError:
            return False
        return True

    good: dict[str, Any] = file.metadata["attention"]
    assert accepted(good, tensors)
    wrong: list[Any] = [None, [], {}, {**good, "x": 1}]
    for part, fields in good.items():
        wrong.append({**good, part: None})
        for name in fields:
            if name != "layer_windows":
                wrong.append({**good, part: {n: v for n, v in fields.items() if n != name}})
            values: tuple[Any, ...] = ("x" * 5000, -1, 10**9, 1.5, [1], {}, {"choose": [], "report": []})
            wrong += [
                {**good, part: {**fields, name: value}}
                for value in values
                if name != "wanted" or value != 10**9
            ]
    assert [w for w in wrong if accepted(w, tensors)] == []
    for name in [n for n in tensors if n.startswith("attention:")]:
        value = tensors[name]
        bad = [None, value[None], value.float(), value - 1e9 if value.is_floating_point() else value + 10**6]
        for other in bad + ([value * math.nan] if value.is_floating_point() else []):
            changed = {**tensors, name: other}
            assert not accepted(good, {n: v for n, v in changed.items() if v is not None}), (name, other)


def test_a_budget_that_no_plan_fits_ends_before_anything_is_written(
    options: Make, long: dict[str, Any]
) -> None:
    chosen = options(**long, kv_budget=0.05, context=512)
    with pytest.raises(BudgetError, match=r"no plan takes 0\.05 of the KV cache at 512 tokens: the smallest"):
        convert(chosen)
    assert not chosen.output.exists()


def test_what_cannot_be_planned_is_refused_when_it_was_asked_for(options: Make, long: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="the model has positions for 1024"):
        convert(options(**long, kv_budget=0.5, context=2048))
    with pytest.raises(UsageError, match="need an attention plan"):
        options(**{**long, "attention_plan": False}, kv_budget=0.5)
    with pytest.raises(UsageError, match=r"`kv_budget` cannot be 1\.5"):
        options(**long, kv_budget=1.5)


def without(reason: str, tmp_path: Path, long: dict[str, Any]) -> dict[str, Any]:
    """The small model, changed so that no plan fits it."""
    folder = tmp_path / "model"
    shutil.copytree(long["model"], folder)
    config = folder / "config.json"
    changes = {"layers": {"layer_types": ["linear_attention", "full_attention"]}, "positions": {}}[reason]
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    return {**long, "model": str(folder)}


@pytest.mark.parametrize(
    ("reason", "context", "memory", "kind", "message"),
    [
        ("layers", 512, None, UnsupportedError, "no attention plan for layers of type linear_attention"),
        ("positions", 2048, None, UsageError, "a context of 2048 tokens: the model has positions for 1024"),
        (
            "positions",
            1024,
            1 << 30,
            UsageError,
            r"at 1024 tokens takes about .* GiB of memory: `context` 512 fits",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_before_the_calibration(
    reason: str,
    context: int,
    memory: int | None,
    kind: type[Exception],
    message: str,
    options: Make,
    long: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(make, "make", lambda *_: pytest.fail("it was calibrated"))
    if memory is not None:
        monkeypatch.setattr(
            possible, "needed_bytes", lambda sizes, tokens, device: (1 << 20 if tokens <= 512 else 1 << 30, 0)
        )
        message = message.replace(" memory:", r" memory, 1.0 are allowed:")
    chosen = {**without(reason, tmp_path, long), "context": context, "memory": memory}
    for command, further in ((calibrate, {}), (convert, {"kv_budget": 0.5})):
        given = options(**chosen, **further, output=tmp_path / "out")
        with pytest.raises(kind, match=message):
            command(given)
        assert not given.output.exists() and not given.output.with_name("out.work").exists()


def test_a_context_without_a_plan_is_refused(options: Make, long: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="leave it or `attention_plan=False` out"):
        options(**{**long, "attention_plan": False}, context=512)


def test_a_model_of_heads_of_two_sizes_is_converted_without_a_plan(
    options: Make, long: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 4: where an effort brings a plan along, the file is made all the same; one that was asked for is refused."""
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    folder = tmp_path / "gemma"
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=len(WORDS) + 2, vocab_size_per_layer_input=len(WORDS) + 2, hidden_size=64, intermediate_size=96,
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
        hidden_size_per_layer_input=16, num_kv_shared_layers=0, max_position_embeddings=1024,
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Gemma4ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(long["model"]) / name, folder / name)
    chosen = long | {"model": str(folder)}
    with pytest.raises(
        UnsupportedError, match=r"no plan for the KV cache: .*'gemma4_text' differ in head_dim"
    ):
        convert(options(**chosen, kv_budget=0.6, context=512))
    made = convert(options(**chosen | {"attention_plan": True}))
    assert made.output.is_file() and not made.report.get("attention")
    assert "no attention plan: " in caplog.text

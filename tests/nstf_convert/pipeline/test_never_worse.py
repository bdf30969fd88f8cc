"""The written file never loses to the best single format of the same size, whatever the model and the budget."""

from pathlib import Path

import pytest

from nstf_convert.pipeline import Budget, ConvertOptions, convert
from nstf_convert.pipeline.improve.run import Run

EXAMPLES = Path(__file__).parents[3] / "examples"
TEXT = EXAMPLES / "data" / "prose.txt"
OTHER = EXAMPLES / "data" / "speeches.txt"


def score(accuracy: dict) -> float:
    return accuracy["mean_kl"] if "mean_kl" in accuracy else accuracy["relative_l2"]


def assert_never_worse(report: dict) -> None:
    accuracy = report["accuracy"]
    uniform = accuracy["uniform"]
    assert report["file"]["size_bytes"] <= report["budget"]["bytes"]
    assert uniform is not None and uniform["size_bytes"] <= report["budget"]["bytes"]
    # On the windows that choose, where several datasets count the same, and on those that report.
    assert accuracy["selection"] <= uniform["selection"]
    assert sum(accuracy["domains"].values()) <= sum(uniform["domains"].values())


@pytest.mark.parametrize("ratio", [0.3, pytest.param(0.55, marks=pytest.mark.slow)])
def test_a_default_conversion_never_loses_to_uniform_by_the_same_steps(
    default_options, monkeypatch, ratio
) -> None:
    encoded = []
    real = Run.front_to_back

    def front_to_back(run, planned):
        encoded.append(planned.label)
        return real(run, planned)

    monkeypatch.setattr(Run, "front_to_back", front_to_back)
    report = convert(default_options(("ratio", ratio))).report
    assert_never_worse(report)
    assert encoded[0] == "mix"
    assert report["accuracy"]["uniform"]["encoding"] in encoded[1:]


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.2, 0.3, 0.5])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_moe", "tiny_conv"])
def test_a_sample_model_never_loses_to_uniform(name, ratio, tmp_path) -> None:
    language = name != "tiny_conv"
    report = convert(
        ConvertOptions(
            model=str(EXAMPLES / name / "model"),
            output=tmp_path / "out.nstf",
            budget=Budget("ratio", ratio),
            datasets=(str(TEXT), str(OTHER)) if language else (),
            samples=16,
            seq_len=64,
            formats=("int_grid", "grid16", "fp8", "mxfp4", "svd", "tucker", "add"),
            attention_plan=False,
            search_steps=2,
        )
    ).report
    assert_never_worse(report)
    if language:
        assert list(report["accuracy"]["domains"]) == [TEXT.name, OTHER.name]

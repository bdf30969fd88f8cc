"""Conversion from Python, and the options of the command line that are made from its dataclass."""

import pytest

import nstf_convert
from nstf.errors import BudgetError, UsageError
from nstf_convert.options import EFFORTS, ConvertOptions


def test_a_model_of_small_tensors_alone_is_told_its_smallest_size(tiny, tmp_path) -> None:
    with pytest.raises(BudgetError, match="cannot be met: the smallest file is") as caught:
        nstf_convert.convert(
            tiny.folder, budget=0.9, dataset=tiny.text, output=tmp_path / "m.nstf", effort="fast", samples=4,
            seq_len=24,
        )  # fmt: skip
    result = nstf_convert.convert(
        tiny.folder, target_size=caught.value.smallest_bytes, dataset=tiny.text, output=tmp_path / "m.nstf",
        effort="fast", samples=4, seq_len=24,
    )  # fmt: skip
    assert result.size_bytes <= caught.value.smallest_bytes


def test_python_is_told_what_it_got_wrong(tiny) -> None:
    with pytest.raises(UsageError, match="exactly one of budget, target_size"):
        nstf_convert.convert(tiny.folder, budget=0.5, target_bpw=3.0)
    with pytest.raises(UsageError, match="new/ is a folder"):
        nstf_convert.convert(tiny.folder, budget=0.5, output="new/")
    with pytest.raises(UsageError, match="unknown option 'sampels': there are"):
        nstf_convert.convert(tiny.folder, budget=0.5, sampels=3)
    with pytest.raises(UsageError, match="the effort 'quick' is not known: choose fast, balanced, best"):
        nstf_convert.convert(tiny.folder, budget=0.5, effort="quick")
    for threads, bound in ((0, "at least 1"), (2000, "at most 1024")):
        with pytest.raises(UsageError, match=f"`threads` cannot be {threads}: it must be {bound}"):
            nstf_convert.convert(tiny.folder, budget=0.5, threads=threads)


def test_an_output_whose_work_directory_has_too_long_a_name_is_wrong_use(tiny, tmp_path) -> None:
    with pytest.raises(UsageError, match="nothing can lie there"):
        nstf_convert.convert(tiny.folder, output=tmp_path / ("a" * 250 + ".nstf"), budget=0.9)


def test_a_budget_of_an_unknown_kind_is_refused() -> None:
    """It was taken for one without a size: the file was as large as it liked."""
    from nstf_convert.budget import Budget

    with pytest.raises(UsageError, match="'ratios' is not known: choose ratio, bytes, bpw, max_kl"):
        Budget("ratios", 0.5)  # type: ignore[arg-type]


def test_an_effort_decides_what_no_switch_says(tmp_path) -> None:
    from nstf_convert.budget import Budget

    def made(**given) -> ConvertOptions:
        return ConvertOptions("m", tmp_path / "m.nstf", Budget("ratio", 0.5), **given)

    assert not made(effort="fast").front_to_back and made(effort="fast", prefix=True).front_to_back
    assert made().front_to_back and made().search_limits is None
    assert made(effort="best").search_limits == (None, EFFORTS["best"].search_steps)
    assert made(effort="best", search=False).search_limits is None
    assert made(search_minutes=2.0).search_limits == (2.0, None)
    assert made(effort="best", search_steps=0).search_limits is None
    assert made().gradient_windows == made().calibration_windows == EFFORTS["balanced"].samples
    fast = made(effort="fast")
    assert 0 < fast.gradient_windows < fast.calibration_windows < made().calibration_windows
    assert (
        made(effort="fast", samples=2 * fast.calibration_windows).gradient_windows
        == 2 * fast.gradient_windows
    )
    assert made(effort="fast", samples=1).gradient_windows == 1
    assert made().reports_apart and not fast.reports_apart
    assert made(effort="fast", search=True).reports_apart and made(effort="fast", heal_steps=1).reports_apart

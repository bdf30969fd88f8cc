"""Conversion from Python, and the options of the command line that are made from its dataclass."""

import pytest

import nstf_convert
from nstf.errors import UsageError
from nstf_convert.cli.schema import FIELDS
from nstf_convert.options import EFFORTS, ConvertOptions


def test_a_model_is_converted_from_python(tiny, tmp_path) -> None:
    result = nstf_convert.convert(
        tiny.folder, budget=0.9, dataset=tiny.text, output=tmp_path / "m.nstf", effort="fast", samples=4, seq_len=24,
        formats=("int_grid",), device="cpu",
    )  # fmt: skip
    assert result.output.exists() and result.size_bytes <= (result.budget_bytes or 0)
    assert result.report["resources"]["effort"] == "fast"


def test_python_is_told_what_it_got_wrong(tiny) -> None:
    with pytest.raises(UsageError, match="exactly one of budget, target_size"):
        nstf_convert.convert(tiny.folder, budget=0.5, target_bpw=3.0)
    with pytest.raises(UsageError, match="unknown option 'sampels'"):
        nstf_convert.convert(tiny.folder, budget=0.5, sampels=3)
    with pytest.raises(UsageError, match="the effort 'quick' is not known: choose fast, balanced, best"):
        nstf_convert.convert(tiny.folder, budget=0.5, effort="quick")


def test_every_option_is_in_the_help_under_its_group(nstf) -> None:
    text = nstf("convert", "--help").out
    for field in FIELDS.values():
        flag = field.metadata["flag"] or "--" + field.name.replace("_", "-")
        assert flag.split("/")[0] in text, field.name
    for group in {f.metadata["group"] for f in FIELDS.values()} - {""}:
        assert f"{group}:" in text


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

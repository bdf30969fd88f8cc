import pytest

from nstf.errors import UsageError
from nstf_convert.cli.sizes import format_bytes, parse_budget, parse_bytes, parse_ratio


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.5", 0.5), ("50%", 0.5), ("33.8 %", 0.338), (".25", 0.25), ("1", 1.0), ("5e-1", 0.5), ("100%", 1.0)],
)
def test_ratios_are_read(text, value):
    assert parse_ratio(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5GiB", 1610612736),
        ("800MB", 800_000_000),
        ("800 mb", 800_000_000),
        ("123456", 123456),
        ("1e6", 1_000_000),
        ("4k", 4096),
        ("2G", 2 << 30),
        ("0.5KiB", 512),
        ("10B", 10),
    ],
)
def test_sizes_are_read(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-0.5", "is negative"),
        ("0", "is zero"),
        ("0%", "is zero"),
        ("nan", "is not a number"),
        ("inf", "is not a number"),
        ("half", "is not a number"),
        ("", "is not a number"),
        ("0,5", "is not a number"),
        ("0.5.1", "is not a number"),
        ("1.5", "more than the whole checkpoint"),
        ("800000000", "give bytes with --target-size"),
        ("٠.٥", "is not a number"),
        ("1e999", "is too large"),
        ("x" * 500, "is not a number"),
    ],
)
def test_a_wrong_ratio_is_refused_with_the_reason(text, words):
    with pytest.raises(UsageError, match=words) as error:
        parse_budget(text, None, None, None)
    assert "--budget" in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-1GiB", "is negative"),
        ("0MB", "is zero"),
        ("nan", "is not a size"),
        ("1.5 parsecs", "is not a size"),
        ("GiB", "is not a number"),
        ("50%", "use --budget"),
        ("0.2", "less than one byte"),
        ("9999999TiB", "is more than"),
        ("1..5GB", "is not a number"),
        ("", "is not a number"),
    ],
)
def test_a_wrong_size_is_refused_with_the_reason(text, words):
    with pytest.raises(UsageError, match=words):
        parse_budget(None, text, None, None)


def test_the_budget_may_be_written_as_a_size_too():
    assert parse_budget("1.5GiB", None, None, None) == ("bytes", 1610612736)


def test_bits_and_divergence_are_read_and_bounded():
    assert parse_budget(None, None, "4.25", None) == ("bpw", 4.25)
    assert parse_budget(None, None, None, "1e-2") == ("max_kl", 0.01)
    with pytest.raises(UsageError, match="--target-bpw '33' is above 32"):
        parse_budget(None, None, "33", None)
    with pytest.raises(UsageError, match="--max-kl '-1' is negative"):
        parse_budget(None, None, None, "-1")


def test_exactly_one_budget_is_wanted():
    with pytest.raises(UsageError, match="no budget: give one of --budget"):
        parse_budget(None, None, None, None)
    with pytest.raises(UsageError, match="--budget and --max-kl exclude each other"):
        parse_budget("0.5", None, None, "0.1")


def test_sizes_are_shown_in_binary_units():
    assert [format_bytes(n) for n in (12, 1024, 3 << 20, 3 << 29)] == [
        "12 B",
        "1.00 KiB",
        "3.00 MiB",
        "1.50 GiB",
    ]

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nstf.kernels.formats import Node, permute, stored_bytes
from nstf.kernels.formats.tree import kinds as format_kinds
from nstf_convert.report.build import TensorReport, layer_of, section_of
from nstf_convert.report.describe import compact, disk_bits, nominal_bits
from nstf_convert.report.html import render
from nstf_convert.report.parts import measured
from nstf_convert.report.plots import FAMILIES, family
from nstf_convert.report.style import STYLE
from nstf_convert.report.svg import Scale, fit, short

spec = importlib.util.spec_from_file_location("report_sample", Path(__file__).with_name("sample.py"))
sample = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sample)


@pytest.fixture(scope="module")
def report():
    return sample.sample()


class Wellformed(HTMLParser):
    """Checks that elements nest, and gathers tags and attributes."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(page: str) -> Wellformed:
    parser = Wellformed()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_sections_add_up_to_the_file(report):
    assert sum(s["size_bytes"] for s in report["file"]["sections"]) == report["file"]["size_bytes"]
    assert report["file"]["sections"][-1] == {
        "name": "header, plan and checksums", "size_bytes": 61_440, "source_bytes": 0,
    }  # fmt: skip


def test_bits_are_stated_nominal_and_on_disk(report):
    row = next(t for t in report["tensors"] if t["encoding"] == "int4 g64")
    assert row["nominal_bits"] == 4 and row["disk_bits"] == 4.25
    assert report["file"]["nominal_bits_per_weight"] < report["file"]["bits_per_weight"]


def test_the_report_is_strict_json(report):
    text = json.dumps(report, allow_nan=False)
    assert json.loads(text) == report
    broken = sample.sample(accuracy=sample.report.AccuracyFacts({"mean_kl": float("nan")}))
    assert broken["accuracy"]["final"]["mean_kl"] is None


def test_encodings_are_named_in_a_few_characters():
    assert compact(sample.corrected(4, 8)) == "int4 g64 + low_rank r8(int8 row)"
    assert compact(Node("permute", permute.Params((1, 0)), {"x": sample.integer(4)})) == "int4 g64 transposed"
    assert nominal_bits(sample.integer(4), (64, 64)) == 4
    assert disk_bits(sample.integer(4), (64, 64)) == 4.25


def test_layers_and_sections_follow_names_and_roles():
    assert layer_of("model.layers.12.mlp.up_proj.weight") == 12
    assert layer_of("transformer.h.3.attn.c_attn.weight") == 3
    assert layer_of("bert.encoder.layer.0.output.dense.weight") == 0
    assert layer_of("model.embed_tokens.weight") is None
    assert section_of("up") == "feed-forward" and section_of("strange") == "other tensors"


def test_the_page_is_self_contained_and_well_formed(report):
    page = render(report)
    parsed = parse(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not any(
        name in ("href", "src", "xlink:href") or name.startswith("on") for name, _ in parsed.attributes
    )
    assert not re.search(r"https?://|@import|url\(", page)
    assert parsed.tags.count("svg") >= 10


def test_a_form_has_the_same_bytes_whether_it_was_chosen_or_rejected():
    forms = sample.integer(3), sample.integer(4)
    rows = [
        TensorReport(
            "w", "up", (64, 64), "bfloat16", one, 8192, 0.5, rejected=[sample.report.Alternative(two, 0.7)]
        )
        for one, two in (forms, forms[::-1])
    ]
    written = [sample.sample(tensors=[row])["tensors"][0] for row in rows]
    for one, two in (written, written[::-1]):
        (rejected,) = one["rejected"]
        assert (rejected["encoding"], rejected["size_bytes"]) == (two["encoding"], two["size_bytes"])
    assert [t["size_bytes"] for t in written] == [stored_bytes(form, (64, 64)) for form in forms]


def test_the_style_is_closed_so_that_no_rule_swallows_the_rest(report):
    style = re.search(r"<style>(.*)</style>", render(report), re.DOTALL).group(1)
    depth = 0
    for sign in re.findall(r"[{}]", style):
        depth += 1 if sign == "{" else -1
        assert 0 <= depth <= 2
    assert depth == 0


def test_the_page_shows_every_part(report):
    page = render(report)
    for words in ("Where the bytes went", "Accuracy", "best uniform: int4 g64", "Bytes against expected loss",
                  "Bits per weight by layer", "What was rejected", "Attention and KV cache", "Roofline", "Calibration",
                  "Time and memory", "All 241 tensors", "prefers-color-scheme: dark"):  # fmt: skip
        assert words in page, words


def test_the_page_counts_by_reason_what_was_not_tried(report):
    page = render(report)
    part = page[page.index("What was not tried") :][:2000]
    assert part.index("it won on no matrix that was measured") < part.index("low_rank")
    given = [t["not_tried"][0]["bound_ratio"] for t in report["tensors"] if t["not_tried"]]
    assert f"{min(given):.3g}" in part and part.count(f">{len(given)}<") == 2


def test_text_of_the_model_cannot_become_markup():
    evil = '</title><script>alert(1)</script>"onload="x'
    tensor = TensorReport(evil, evil, (64, 64), "bfloat16", sample.integer(4), 8192, 0.5, note=evil,
                          rejected=[sample.report.Alternative(sample.integer(3), 0.7)],
                          not_tried=[sample.report.NotTried(evil, evil)])  # fmt: skip
    facts = sample.report.ModelFacts(evil, evil, evil, evil, 4096, 8192, 1, (evil,))
    calibration = sample.report.CalibrationFacts(
        evil, False, 1, 1, 1, 0, [sample.report.ExpertTokens(evil, (1, 0))]
    )
    page = render(sample.sample(model=facts, tensors=[tensor], calibration=calibration, command=evil))
    assert "<script" not in page and 'onload="x' not in page.replace("&quot;onload=&quot;x", "")
    assert "script" not in parse(page).tags


def test_a_report_with_hardly_anything_still_renders():
    bare = sample.sample(tensors=[], accuracy=sample.report.AccuracyFacts(None), attention=None, calibration=None,
                         stages=(), roofline=None, command="",
                         budget={"kind": "max_kl", "value": 0.1, "bytes": None})  # fmt: skip
    page = render(bare)
    parse(page)
    assert "Not measured" in page and "Roofline" not in page
    similarity = {"mean_cosine": 0.9999, "min_cosine": 0.999, "relative_l2": 0.01, "outputs": 16}
    assert "smallest cosine" in render(sample.sample(accuracy=sample.report.AccuracyFacts(similarity)))


def test_a_file_above_its_budget_is_marked():
    page = render(sample.sample(budget={"kind": "bytes", "value": 10.0, "bytes": 10}))
    assert 'class="bad"' in page


def test_scales_have_round_ticks_and_clamp():
    assert Scale(0, 10, 0, 100).ticks(5) == [0, 2, 4, 6, 8, 10]
    assert Scale(1e-4, 1e2, 0, 1, log=True).ticks(10) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 100])
    assert Scale(1, 10, 0, 100)(1e9) == 100
    assert fit([], 0, 1)(5) >= 0 and fit([3.0], 0, 1).low < 3 < fit([3.0], 0, 1).high
    assert [short(v) for v in (0, 1500, 0.00012, 3e9)] == ["0", "1.5k", "1.2e-4", "3G"]


def test_trellis_and_rotated_tensors_have_colours_of_their_own():
    trellis = {"kind": "trellis", "params": {}}
    assert family({"kind": "rotated", "children": {"x": trellis}}) == "trellis" == family(trellis)
    assert family({"kind": "rotated", "children": {"x": {"kind": "int"}}}) == "int"
    assert family({"kind": "shuffle"}) == "shuffle" and family({"kind": "dense"}) == "dense"
    styles = [style for style, _ in FAMILIES.values()]
    assert len(set(styles)) == len(styles) and all(f".{style} {{ fill" in STYLE for style in styles)
    # Every family of formats that a file can hold, dense ones apart, is told from dense.
    kinds = {
        k
        for k in format_kinds()
        if k not in ("dense", "add", "permute", "rotated", "cp", "tucker", "tensor_train")
    }
    assert {family({"kind": kind}) for kind in kinds} == kinds


@pytest.mark.parametrize(
    ("value", "error", "form", "shown"),
    [
        (0.01234567, 0.0012345, ".5f", ("0.01235", "0.00123")),
        (0.0000312, 0.00000214, ".5f", ("0.0000312", "0.0000021")),
        (0.0000312, None, ".5f", ("0.000031", "")),
        (12.3456, 0.5, ".4f", ("12.3456", "0.5000")),
        (0.0, 0.0, ".5f", ("0.00000", "0.00000")),
        (1.0, float("nan"), ".5f", ("1.00000", "nan")),
        (None, 0.1, ".5f", ("-", "")),
    ],
)
def test_small_figures_keep_their_first_digits(value, error, form, shown):
    assert measured(value, error, form) == shown


def test_the_accuracy_table_has_a_line_for_each_figure(report):
    section = render(report).partition("<h2>Accuracy</h2>")[2].partition("</section>")[0]
    head = section.partition("</thead>")[0]
    assert head.count("<th") - head.count("<thead") <= 3
    for name in ("bytes", "mean KLD", "99th percentile", "perplexity", "ratio"):
        assert f"<td>{name}</td>" in section

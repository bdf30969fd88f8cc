"""The HTML report in a real browser: nothing is cut off on a telephone, nothing is fetched."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from nstf_convert.report.html import render

SAMPLE = Path(__file__).parents[1] / "nstf_convert" / "report" / "sample.py"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("report_sample", SAMPLE)
    assert spec is not None and spec.loader is not None
    sample = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sample)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(sample.sample()), "utf-8")
    return path


@pytest.mark.parametrize("width", [1280, 420])
def test_every_table_is_whole_or_scrolls(browser: Any, page_file: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    assert asked == [page_file.as_uri()]
    assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    # Tables wider than the page lie in boxes that scroll; the accuracy is to be seen without scrolling.
    wide = page.evaluate(
        "[...document.querySelectorAll('table')].filter(t => !t.closest('.scroll')"
        " && t.getBoundingClientRect().right > document.documentElement.clientWidth).length"
    )
    assert wide == 0
    accuracy = page.evaluate(
        "[...document.querySelectorAll('section')].find(s => s.innerText.includes('Accuracy'))"
        ".querySelector('table').getBoundingClientRect().right <= document.documentElement.clientWidth"
    )
    assert accuracy

"""The chat page in a real browser, wide and narrow."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.serve.conftest import Served, write_sample


class Page:
    """A page of a server, and what it asked for and complained about."""

    def __init__(self, browser: Any, port: int, width: int) -> None:
        self.base = f"http://127.0.0.1:{port}/"
        self.page = browser.new_page(viewport={"width": width, "height": 720})
        self.said: list[str] = []
        self.asked: set[str] = set()
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on(
            "console",
            lambda m: self.said.append(m.text) if m.type == "error" and "40" not in m.text else None,
        )
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.page.goto(self.base)

    def until(self, expression: str) -> None:
        """Waits for something of the page to be true. The page's own rules forbid what playwright would wait by."""
        end = time.monotonic() + 60
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, expression
            self.page.wait_for_timeout(20)

    def send(self, text: str) -> None:
        self.page.fill("#text", text)
        self.page.keyboard.press("Enter")

    def boxes(self) -> list[tuple[str, str]]:
        """(class, text) of what the conversation shows."""
        return [
            (box.get_attribute("class"), box.query_selector("div").text_content())
            for box in self.page.query_selector_all("article")
        ]


@pytest.mark.parametrize("width", [1280, 420])
def test_a_conversation_on_the_page(serve: Callable[..., Served], browser: Any, width: int) -> None:
    server = serve()
    at = Page(browser, server.port, width)
    at.until("document.title === 'tiny'")
    assert at.page.evaluate("document.activeElement.id") == "text"
    at.page.click("summary")
    at.page.fill("#max_tokens", "12")
    at.page.fill("#temperature", "0")
    at.page.click("summary")
    at.send("What news, my lord?")
    at.until("document.getElementById('status').textContent.includes('per second')")
    (mine, question), (theirs, answer) = at.boxes()
    assert (mine, question, theirs) == ("user", "What news, my lord?", "assistant")
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 12, "temperature": 0}
    _, found = server.json("/v1/chat/completions", body)
    assert answer.strip() == found["choices"][0]["message"]["content"].strip() != ""
    # An answer that is stopped keeps what it has; one that fails says why.
    at.page.click("summary")
    at.page.fill("#max_tokens", "400")
    at.page.fill("#repetition_penalty", "1.3")
    at.send("Tell me more.")
    at.until("document.querySelectorAll('article').length === 4")
    at.page.keyboard.press("Escape")
    at.until("!document.getElementById('send').hidden")
    at.page.fill("#temperature", "9")
    at.send("And then?")
    at.until("document.querySelectorAll('article.failed').length === 1")
    assert "temperature" in at.boxes()[-1][1]
    assert not at.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    at.page.click("#new")
    assert at.boxes() == [] and at.said == []
    assert all(url.startswith((at.base, "data:")) for url in at.asked)


def test_a_model_without_a_template_continues_texts(
    serve: Callable[..., Served], browser: Any, tmp_path: Path
) -> None:
    server = serve(path=write_sample(tmp_path / "plain.nstf", template=None), key="k-123")
    at = Page(browser, server.port, 420)
    at.page.click("summary")
    at.page.fill("#key", "k-123")
    at.page.fill("#max_tokens", "6")
    at.page.fill("#temperature", "0")
    at.until("document.getElementById('status').textContent.includes('no chat template')")
    at.send("The king ")
    at.until("document.getElementById('status').textContent.includes('per second')")
    at.send(" and then")
    at.until("document.querySelectorAll('article').length === 4 && !document.getElementById('send').hidden")
    at.send("")
    at.until("document.querySelectorAll('article').length === 5 && !document.getElementById('send').hidden")
    assert [kind for kind, _ in at.boxes()][3:] == ["assistant", "assistant"]
    texts = [text for _, text in at.boxes()]
    key = {"Authorization": "Bearer k-123"}
    for end in (1, 3, 4):
        body = {"prompt": "".join(texts[:end]), "max_tokens": 6, "temperature": 0}
        assert server.json("/v1/completions", body, **key)[1]["choices"][0]["text"] == texts[end]


def test_the_page_sends_the_key_that_is_typed(serve: Callable[..., Served], browser: Any) -> None:
    at = Page(browser, serve(key="k-123").port, 1280)
    at.page.click("summary")
    at.page.fill("#max_tokens", "4")
    at.send("Hello")
    at.until("document.querySelectorAll('article.failed').length === 1")
    assert "API key" in at.boxes()[-1][1]
    at.page.fill("#key", "k-123")
    at.send("Hello")
    at.until("document.getElementById('status').textContent.includes('per second')")
    assert [kind for kind, _ in at.boxes()].count("assistant") == 1

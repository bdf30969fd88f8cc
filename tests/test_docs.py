"""What README and docs show runs: every command and every block of Python, on a small model with small settings."""

import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from nstf_convert.cli import application, run

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/guide.md", "docs/api.md")
# They end when the user says so: parsed here, run by tests of their own.
LASTING = ("serve", "chat")
# `nstf export --to`: these refuse what they cannot hold exactly, and tokenizers they do not have. The tests with the
# engines themselves are in tests/integrations.
MAY_REFUSE = ("gguf", "compressed-tensors")
WORDS = "the cat sat on a mat and then it ran to see one more dog by old red barn now once upon time".split()
# What keeps a run short, for commands that do not say otherwise.
SMALL = {
    "convert": ("--samples", "4", "--seq-len", "24", "--no-profile", "--force"),
    "plan": ("--samples", "4", "--seq-len", "24"),
    "calibrate": ("--samples", "4", "--seq-len", "24", "--force"),
    "eval": ("--windows", "2", "--seq-len", "24"),
    "diff": ("--windows", "2", "--seq-len", "24"),
    "generate": ("--max-new-tokens", "4"),
    "bench": ("--prompt", "8", "--tokens", "4", "--repetitions", "1"),
}


def commands(page: str) -> list[tuple[str, str]]:
    """(command, its comment) of every line of the page's sh blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return [(line.partition(" #")[0].strip(), line.partition(" #")[2].strip()) for line in lines]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def words_of(command: str) -> list[str] | None:
    """The words after `nstf`, or None for another program."""
    words = shlex.split(command)
    return words[1:] if words[0] in ("nstf", ".venv/bin/nstf") else None


def parse(words: list[str]) -> None:
    """Raises what the command line raises for words it does not take; runs nothing."""
    group = typer.main.get_command(application([words[0], "verify"]))
    group.commands[words[0]].make_context(words[0], list(words[1:]))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages assume: a model, texts, the examples."""
    folder = tmp_path_factory.mktemp("reader")
    make_model(folder / "model")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "texts").mkdir()
    text = " ".join(WORDS[(i * i + i // 3) % len(WORDS)] for i in range(900))
    for name in ("texts/a.txt", "more.txt", "held_out.txt"):
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's folder; measured speeds are kept there, and not among the user's."""
    from nstf_convert.speed import cache

    monkeypatch.chdir(place)
    monkeypatch.setattr(cache, "folder", lambda: place / "speeds")
    yield place


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 900


def test_every_link_and_picture_leads_somewhere() -> None:
    pages = [
        ROOT / "README.md",
        *(
            ROOT / "docs" / f"{n}.md"
            for n in (
                "guide",
                "api",
                "architecture",
                "format",
                "figures",
                "serve",
                "exports",
                "limits",
                "attacks",
            )
        ),
        ROOT / "SECURITY.md",
    ]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("name", ["SECURITY.md", "docs/attacks.md", "docs/reviews.md"])
def test_every_test_and_setting_that_a_page_on_security_names_is_there(name: str) -> None:
    """Each of its rows is a command that someone may run."""
    page = (ROOT / name).read_text("utf-8")
    files = list((ROOT / "tests").rglob("*.py"))
    names = {file.stem for file in files}
    assert set(re.findall(r"\btest_[a-z0-9_]+", page)) <= names
    assert all((ROOT / path).exists() for path in re.findall(r"tests/[a-z_/]+(?:\.py)?", page))
    # Some are put together there of `NSTF_FUZZ_` and a word.
    tests = "".join(file.read_text("utf-8") for file in files)
    for setting in re.findall(r"NSTF_[A-Z_]+", page):
        assert setting in tests or f'"{setting.removeprefix("NSTF_FUZZ_")}"' in tests, setting


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_parses(page: str) -> None:
    for command, comment in commands(page):
        words = words_of(command)
        if words is not None:
            parse(words)
        elif words is None:
            check_other(command)
        assert comment.startswith("needs") or words is not None, f"{page}: {command} cannot run in a test"


def check_other(command: str) -> None:
    """make has the target, pip the extras; curl is about the server; tests/integrations/test_vllm.py runs vllm."""
    words = shlex.split(command)
    assert words[0] in ("make", "pip", "curl", "vllm"), command
    if words[0] == "curl":
        assert "Content-Type: application/json" in words, "the server takes JSON only"
    if words[0] == "make":
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for extra in re.findall(r"\.\[([\w,]+)\]", command):
        known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
            "optional-dependencies"
        ]
        assert set(extra.split(",")) <= set(known), command


def make_model(folder: Path) -> None:
    """Saves a Llama of 2 layers, large enough that its weights are most of a file, and a word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 2, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {"<unk>": 0, "<end>": 1} | {word: i + 2 for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>").save_pretrained(
        folder
    )


def short(words: list[str]) -> list[str]:
    """The words with small settings, and with `fast` where no effort is named."""
    extra = list(SMALL.get(words[0], ()))
    if words[0] in ("convert", "plan") and "--effort" not in words:
        extra += ["--effort", "fast"]
    if "--tasks" in words:
        extra += ["--limit", "4"]
    return [*words, *extra]


def run_commands(page: str) -> int:
    """Runs every command of a page that needs nothing; gives back how many."""
    count = 0
    for command, comment in commands(page):
        words = words_of(command)
        if words is None or comment.startswith("needs") or words[0] in LASTING:
            continue
        allowed = [0]
        if "--to" in words and words[words.index("--to") + 1] in MAY_REFUSE:
            allowed.append(6)
        # The model has random weights: that a gate fails is an answer, too.
        if words[0] == "eval" and any(w.startswith(("--min-", "--max-")) for w in words):
            allowed.append(4)
        assert run([*short(words), "--quiet"]) in allowed, f"{page}: {command}"
        count += 1
    return count


def run_python(page: str) -> int:
    """Runs the Python of a page, block after block, in one namespace."""
    names: dict[str, object] = {}
    found = blocks(page, "python")
    for number, code in enumerate(found):
        if "lm_eval" in code:
            continue  # wants the network for its data; tests/integrations runs it on data of its own
        if "peft" in code:
            try:
                import peft  # noqa: F401
            except ImportError:
                continue  # make integrations
        code = code.replace('effort="fast"', 'effort="fast", samples=4, seq_len=24')
        exec(compile(code, f"{page}, block {number}", "exec"), names)
    return len(found)


def test_the_commands_and_the_python_of_the_readme_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_commands("README.md") == 7
    assert run_python("README.md") == 1
    assert (here / "tiny.nstf").stat().st_size <= 0.5 * 5_759_488


def test_the_python_of_the_reference_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_python("docs/api.md") == 4
    assert not (here / "small.nstf").exists()


def test_the_reference_names_every_keyword_of_convert_and_load() -> None:
    import nstf.runtime
    from nstf_convert.keywords import ConvertKeywords

    convert, _, load = (ROOT / "docs" / "api.md").read_text("utf-8").partition("## Look inside")
    assert [name for name in ConvertKeywords.__annotations__ if f"`{name}`" not in convert] == []
    parameters = list(inspect.signature(nstf.runtime.load).parameters)[1:]
    assert [name for name in parameters if f"\n| `{name}` |" not in load] == []


@pytest.mark.slow
def test_the_python_of_the_guide_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_python("docs/guide.md") == 4


@pytest.mark.slow
def test_the_commands_of_the_guide_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_commands("docs/guide.md") >= 25


@pytest.mark.slow
def test_the_server_of_the_guide_answers_the_request_it_shows(here: Path) -> None:
    pytest.importorskip("uvicorn", reason="nstf serve needs the extra serve")
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    convert(["./model", "-o", "model.nstf"])
    served = [c for c, _ in commands("docs/guide.md") if c.startswith("nstf serve")]
    (asked,) = (c for c, _ in commands("docs/guide.md") if c.startswith("curl"))
    assert len(served) == 2
    for command in served:
        # The word-level tokenizer of the sample has no chat template.
        (here / "template").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
        words = [*shlex.split(command)[1:], "--chat-template", "template"]
        if "--port" in words:
            del words[words.index("--port") : words.index("--port") + 2]
        program = [sys.executable, "-m", "nstf_convert", *words, "--port", "0", "--max-tokens", "8"]
        with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            lines = iter(server.stderr.readline, "")
            port = next(m[1] for m in (re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in lines) if m)
            request = [word.replace(":8000/", f":{port}/") for word in shlex.split(asked)]
            answer = subprocess.run([*request, "--silent"], capture_output=True, text=True)
            server.terminate()
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"
        assert server.returncode == 0


def convert(words: list[str]) -> None:
    """Converts to half the bytes, with small settings."""
    assert run([*short(["convert", *words]), "--budget", "0.5", "--dataset", "texts/", "--quiet"]) == 0

"""A small Llama with a tokenizer and a text, large enough that every kind of candidate is tried."""

import gc
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nstf_convert.options import ConvertOptions, ConvertResult
from nstf_convert.pipeline import Budget, convert
from nstf_convert.pipeline.improve.rival import LOOKS

WORDS = [
    a + b
    for a in ("ka", "lo", "mi", "nu", "pe", "ra", "si", "to")
    for b in ("b", "d", "g", "l", "m", "n", "r", "s")
]


@dataclass(frozen=True)
class Small:
    """folder: the model; text: text of its words."""

    folder: Path
    text: Path


@pytest.fixture(scope="session", autouse=True)
def _frozen() -> Iterator[None]:
    """A conversion asks whether objects are frozen: they are (`small`), and counting them takes a tenth of a second."""
    from nstf_convert.pipeline import session

    with pytest.MonkeyPatch.context() as patch:
        counted = SimpleNamespace(get_freeze_count=lambda: 1, freeze=gc.freeze, unfreeze=gc.unfreeze)
        patch.setattr(session, "gc", counted)
        yield


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Small:
    root = tmp_path_factory.mktemp("small")
    folder = root / "model"
    make_llama(folder)
    rng = random.Random(0)
    text = root / "text.txt"
    text.write_text(" ".join(rng.choice(WORDS) for _ in range(3000)))
    # Every measurement collects garbage; what was imported by now is none, and need not be looked through each time.
    gc.collect()
    gc.freeze()
    return Small(folder, text)


def make_llama(folder: Path, dtype: torch.dtype = torch.bfloat16, layers: int = 2, **changes: Any) -> None:
    """Saves a Llama of some layers, 64 wide, and a word-level tokenizer. changes: of the config."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = {
        "vocab_size": len(WORDS) + 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.25,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    LlamaForCausalLM(LlamaConfig(**config | changes)).to(dtype).save_pretrained(folder)
    vocabulary = {"<unk>": 0, "<end>": 1} | {word: i + 2 for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    wrapped.save_pretrained(folder)


# What a test switches off that is about something else.
QUICK = {
    "search": False,
    "prefix": False,
    "attention_plan": False,
    "formats": ("int_grid", "svd", "add"),
}


def make_options(small: Small, budget: tuple[str, float] = ("ratio", 0.5), **changes: Any) -> ConvertOptions:
    """A conversion of the small model on little text; nothing is switched off but the clock, which would make files differ
    from machine to machine."""
    settings = {
        "prefer": "size",
        "model": str(small.folder),
        "datasets": (str(small.text),),
        "samples": 6,
        "seq_len": 32,
        "threads": 1,
    }
    return ConvertOptions(budget=Budget(*budget), **{**settings, **changes})


@pytest.fixture
def default_options(small, tmp_path) -> Callable[..., ConvertOptions]:
    """Makes ConvertOptions of a default conversion of the small model; keyword arguments override."""
    return lambda budget=("ratio", 0.5), **changes: make_options(
        small, budget, **{"output": tmp_path / "out.nstf", **changes}
    )


@pytest.fixture
def options(default_options) -> Callable[..., ConvertOptions]:
    """Makes ConvertOptions that are quick: tensors on their own, in few formats."""
    return lambda budget=("ratio", 0.5), **changes: default_options(budget, **{**QUICK, **changes})


@dataclass(frozen=True)
class Converted:
    """One conversion. options: as it was asked for; content: the file."""

    options: ConvertOptions
    result: ConvertResult
    content: bytes

    @property
    def work(self) -> Path:
        """The work directory it kept."""
        assert self.options.work_dir is not None
        return self.options.work_dir


def assert_not_worse_than_one_format(accuracy: dict[str, Any]) -> None:
    """The best single format measured no better, or was given up where it was expected to lose far more."""
    uniform, stopped = accuracy["uniform"], accuracy["stopped"]
    assert uniform or stopped
    if uniform:
        assert accuracy["selection"] <= uniform["selection"]
    for found in stopped:
        assert found["mix"] == accuracy["selection"] or uniform
        assert found["expected"] > LOOKS[-1][1] * found["mix"] > 0 and 0 < found["share"] < 1


def run(chosen: ConvertOptions) -> Converted:
    result = convert(chosen)
    return Converted(chosen, result, result.output.read_bytes())


@pytest.fixture(scope="session")
def converted(small, tmp_path_factory) -> Converted:
    """The small model by a default conversion, with its work directory. Tests read it, or change a copy."""
    folder = tmp_path_factory.mktemp("default")
    return run(make_options(small, output=folder / "out.nstf", work_dir=folder / "work"))


@pytest.fixture(scope="session")
def quick(small, tmp_path_factory) -> Converted:
    """The small model by a quick conversion, whose work directory was its own and is gone."""
    output = tmp_path_factory.mktemp("quick") / "out.nstf"
    return run(make_options(small, output=output, **QUICK))


@pytest.fixture
def copied_work(converted, tmp_path) -> Path:
    """A copy of the work directory of the default conversion, with its calibration and all it encoded."""
    return Path(shutil.copytree(converted.work, tmp_path / "copied"))

"""lm-eval's own HFLM on a loaded model: the same figures as on the dense one."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nstf.runtime

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make integrations")


def tokenizer() -> Any:
    """A tokenizer of 100 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 100)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.mark.parametrize("tied", [True, False])
def test_log_likelihoods_and_text_are_those_of_the_dense_model(
    tiny: ModuleType, tmp_path: Path, tied: bool
) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    dense = tiny.new_model("LlamaForCausalLM", tie_word_embeddings=tied)
    path = tiny.write(tmp_path, dense)
    pairs = [("w5 w9 w20", " w7"), ("w5 w9 w20", " w8 w30"), ("w40", " w41 w42")]
    scores, texts = [], []
    for model in (dense, nstf.runtime.load(path)):
        judge = HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=2, device="cpu")
        asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        scores.append(judge.loglikelihood(asked, disable_tqdm=True))
        until = Instance(
            "generate_until", {}, ("w5 w9", {"until": ["</s>"], "max_gen_toks": 4, "do_sample": False}), 0
        )
        texts.append(judge.generate_until([until], disable_tqdm=True))
    assert texts[0] == texts[1]
    for (expected, same), (found, also) in zip(*scores, strict=True):
        assert found == pytest.approx(expected, abs=1e-3) and same == also

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


def test_our_multiple_choice_scores_are_lm_evals(tiny: ModuleType, tmp_path: Path) -> None:
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from nstf.runtime.artifact import open_artifact
    from nstf_convert.gates.choices import answer, encode
    from nstf_convert.gates.tasks import Question
    from nstf_convert.streamed import StreamedModel

    dense = tiny.new_model("LlamaForCausalLM")
    path, words = tiny.write(tmp_path, dense), tokenizer()
    questions = [
        Question("w5 w9 w20", (" w7", " w8 w30", " w31 w32 w33"), 0, "1"),
        Question("w40 ", ("w41 w42", "w3"), 1, "2"),
        Question("w40\nw41:", (" w4", " w44"), 1, "3"),
    ]
    judge = HFLM(pretrained=nstf.runtime.load(path), tokenizer=words, batch_size=2, device="cpu")
    pairs = [(q.context, choice) for q in questions for choice in q.choices]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    expected = [value for value, _ in judge.loglikelihood(asked, disable_tqdm=True)]
    with open_artifact(path) as artifact:
        found = answer(
            StreamedModel.from_artifact(artifact), [encode(words, q, 64) for q in questions], questions
        )
    scores = torch.tensor([score for row in found.scores for score in row])
    torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-3, rtol=1e-3)


def test_a_task_of_ones_own_runs_as_the_guide_says(tiny: ModuleType, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    path = tiny.write(tmp_path, tiny.new_model("LlamaForCausalLM"))
    rows = [f'{{"context": "w{i} w9", "choices": ["w7", "w8 w30"], "answer": {i % 2}}}' for i in range(3, 9)]
    (tmp_path / "q.jsonl").write_text("\n".join(rows))
    task = {
        "task": "ours", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "q.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "num_fewshot": 0,
    }  # fmt: skip
    judge = HFLM(pretrained=nstf.runtime.load(path), tokenizer=tokenizer(), batch_size=2, device="cpu")
    results = simple_evaluate(judge, tasks=[task], bootstrap_iters=0, log_samples=False)
    assert 0 <= results["results"]["ours"]["acc,none"] <= 1

"""Multiple choice: the file of questions, the scores, the figures, the gates."""

import json
import math
import shutil
import tracemalloc
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from nstf.errors import UsageError
from nstf_convert.cli import run
from nstf_convert.gates.choices import Answers, Pair, answer, encode, log_likelihoods, summarise
from nstf_convert.gates.evaluate import TaskGates, check_tasks
from nstf_convert.gates.tasks import Question, joined_without_space, read_tasks

GOOD = {"context": "the cat", "choices": [" sat", " ran"], "answer": 1}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", "utf-8")
    return path


@pytest.fixture
def evaluate(capsys):
    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["eval", *[str(w) for w in words]])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def questions(tmp_path) -> Path:
    rows = [
        {"context": "the cat sat on", "choices": [" a mat", " to see", " one more dog by"], "answer": 0, "task": "a"},
        {"context": "old red barn", "choices": [" now", " it ran"], "answer": 1, "task": "b", "id": "barn"},
        {"context": "", "choices": [" dog", " cat"], "answer": 0, "task": "a"},
        {"context": "it ran to see ", "choices": ["one", "more", "dog", "by"], "answer": 3, "task": "b"},
    ]  # fmt: skip
    return write(tmp_path / "q.jsonl", *rows)


def test_questions_are_read_in_their_order_and_empty_lines_are_skipped(tmp_path) -> None:
    path = write(tmp_path / "q.jsonl", GOOD, "", {**GOOD, "id": "x", "task": "t", "context": "a\u2028b"})
    assert read_tasks(path) == [
        Question("the cat", (" sat", " ran"), 1, "1"),
        Question("a\u2028b", (" sat", " ran"), 1, "x", "t"),
    ]
    assert [q.name for q in read_tasks(path, limit=1)] == ["1"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"context": "a"', "not JSON"),
        ("[1]", "not an object"),
        ({"context": "a", "choices": [" b", " c"]}, "the key 'answer' is missing"),
        ({**GOOD, "anwser": 1}, "unknown key 'anwser': there are context, choices, answer, id, task"),
        ({**GOOD, "answer": 2}, "'answer' is 2: give the index of the right choice, 0 to 1"),
        ({**GOOD, "answer": "1"}, "'answer' is"),
        ({**GOOD, "answer": True}, "'answer' is true"),
        ({**GOOD, "choices": [" b"]}, "'choices' must be a list of 2 to 100 texts"),
        ({**GOOD, "choices": [" b", 3]}, "choice 1 is not a text"),
        ({**GOOD, "choices": [" b", " "]}, "choice 1 is not a text, or empty"),
        ({**GOOD, "choices": [" b", " b"]}, "two choices are the same"),
        ({**GOOD, "context": 3}, "'context' must be a text, not 3"),
        ({**GOOD, "id": True}, "'id' must be a text, not true"),
        ('{"context": "a", "context": "b", "choices": [" b", " c"], "answer": 0}', "a key is there twice"),
        ("[" * 100000, "nested too deeply"),
        ({**GOOD, "context": "a\ud800"}, "'context' is not Unicode (half a character at 1)"),
        ({**GOOD, "choices": [" b", "\udc00"]}, "choice 1 is not Unicode"),
    ],
)
def test_a_bad_line_is_named_by_its_number(evaluate, tiny, tmp_path, line, message) -> None:
    code, _, err = evaluate(tiny.same, "--tasks", write(tmp_path / "q.jsonl", GOOD, "", line))
    assert code == 2 and "q.jsonl, line 3: " in err and message in err
    assert len(err.splitlines()) == 1


def test_a_question_is_named_by_its_number_too(tmp_path) -> None:
    """Many data sets number their questions; the file was refused."""
    lines = ({**GOOD, "id": 17}, {**GOOD, "id": "a"}, GOOD)
    assert [q.name for q in read_tasks(write(tmp_path / "q.jsonl", *lines))] == ["17", "a", "3"]


def test_a_file_without_questions_or_of_another_kind_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="no question inside: give one JSON object a line"):
        read_tasks(write(tmp_path / "q.jsonl", ""))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        read_tasks(tmp_path / "b.jsonl")


def test_lines_are_read_one_at_a_time(tmp_path) -> None:
    """A hundred megabytes of blank lines were 2.7 GB of texts."""
    path = tmp_path / "q.jsonl"
    path.write_bytes("\ufeff".encode() + json.dumps(GOOD).encode() + b"\n" + b"  \n" * 200_000)
    tracemalloc.start()
    try:
        assert len(read_tasks(path)) == 1
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


class Bigrams:
    """A language model of a table: logits of the next token given the last one."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(ids, len(self.table)).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.table


def test_a_score_is_the_sum_of_the_choices_log_probabilities() -> None:
    table = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    log_p = torch.log_softmax(table.double(), -1)
    pairs = [Pair((1, 2, 3), 1), Pair((4, 5, 6, 1, 2), 3), Pair((0, 0), 1)]
    expected = [log_p[2, 3], log_p[5, 6] + log_p[6, 1] + log_p[1, 2], log_p[0, 0]]
    found = log_likelihoods(Bigrams(table), pairs)
    assert found == pytest.approx([float(x) for x in expected], abs=1e-6)


def test_long_choices_are_favoured_only_by_the_score_per_character() -> None:
    table = torch.zeros(3, 3)  # every token costs log 3
    question = Question("x", (" a", " bbbbbbbbb"), 1, "1")
    answers = answer(Bigrams(table), [[Pair((0, 1), 1), Pair((0, 1, 2), 2)]], [question])
    assert answers.raw == (0,) and answers.normalised == (1,)
    assert answers.scores[0] == pytest.approx((-math.log(3), -2 * math.log(3)))


def test_figures_are_those_of_the_definition() -> None:
    questions = [
        Question("", ("a", "b"), a, str(i), "t" if i < 3 else "u") for i, a in enumerate((0, 0, 1, 1, 1))
    ]
    test = Answers((0, 1, 1, 0, 1), (0, 0, 0, 0, 0), ())
    reference = Answers((0, 0, 0, 0, 1), (0, 0, 1, 1, 1), ())
    groups = summarise(questions, test, reference)
    every = groups[""]
    assert (every.questions, every.accuracy, every.reference_accuracy) == (5, 0.6, 0.6)
    assert every.accuracy_se == pytest.approx(math.sqrt(0.6 * 0.4 / 4))
    assert (every.flips, every.lost, every.gained, every.change) == (0.4, 1, 1, 0.0)
    assert every.change_se == pytest.approx(math.sqrt((1 + 1) / 4 / 5))
    assert groups["t"].questions == 3 and groups["u"].accuracy == 0.5
    alone = summarise(questions[:1], Answers((0,), (1,), ()), None)[""]
    assert (alone.accuracy, alone.accuracy_se, alone.accuracy_norm, alone.flips) == (1.0, None, 0.0, None)


def test_a_score_that_is_not_a_number_is_never_right() -> None:
    table = torch.full((3, 3), math.nan)
    questions = [Question("x", ("a", "b"), 0, "1")]
    answers = answer(Bigrams(table), [[Pair((0, 1), 1), Pair((0, 2), 1)]], questions)
    assert answers.raw == (-1,) == answers.normalised
    group = summarise(questions, answers, None)[""]
    assert math.isnan(group.accuracy) and math.isnan(group.accuracy_norm)
    assert not any(check.passed for check in check_tasks(TaskGates(min_accuracy=0.0), group))
    group = summarise(questions, answers, Answers((0,), (0,), ()))[""]
    assert not any(check.passed for check in check_tasks(TaskGates(max_flips=1.0), group))


def test_contexts_lose_their_oldest_tokens_and_a_choice_that_is_too_long_is_named(tiny) -> None:
    import nstf.runtime

    tokenizer = nstf.runtime.load_tokenizer(tiny.same)
    question = Question("the cat sat on a mat", (" and", " then it"), 0, "7")
    whole, cut = encode(tokenizer, question, 128), encode(tokenizer, question, 4)
    assert [p.scored for p in whole] == [1, 2] == [p.scored for p in cut]
    assert [p.ids[-4:] for p in whole] == [p.ids for p in cut]
    with pytest.raises(
        UsageError, match="question 7: a choice of 2 tokens does not fit the model's 2 positions"
    ):
        encode(tokenizer, question, 2)


def test_a_tokenizer_gets_no_more_of_a_text_than_counts(tiny) -> None:
    """A context of 30 MB took 6 GB, of which the model sees its last few hundred tokens."""
    import nstf.runtime

    tokenizer = nstf.runtime.load_tokenizer(tiny.same)
    longest = max(map(len, tokenizer.get_vocab()))
    seen: list[int] = []

    class Counting:
        bos_token_id = tokenizer.bos_token_id
        get_vocab = staticmethod(tokenizer.get_vocab)

        def __call__(self, text: str, **options: object) -> object:
            seen.append(len(text))
            return tokenizer(text, **options)

    long = Question("the cat sat on a mat " * 50_000, (" and", " then it"), 0, "8")
    short = Question("the cat sat on a mat " * 100, (" and", " then it"), 0, "8")
    counting = Counting()
    assert encode(counting, long, 16) == encode(tokenizer, short, 16)
    assert max(seen) <= 2 * 16 * longest + 10
    for question in (
        Question("the cat", (" and" * 50_000, " it"), 0, "9"),
        Question("the cat" + " " * 100_000, ("and", "it"), 0, "9"),
    ):
        with pytest.raises(
            UsageError, match=r"question 9: .* characters does not fit the model's 16 positions"
        ):
            encode(counting, question, 16)


def test_questions_are_cut_to_the_positions_that_a_table_has_for_tokens(tiny) -> None:
    """RoBERTa's begin behind the one of padding, so its config states more than it has."""
    from transformers import RobertaConfig, RobertaForCausalLM

    import nstf.runtime
    from nstf_convert.cli.eval_tasks import answers
    from nstf_convert.streamed import StreamedModel

    config = RobertaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=34, is_decoder=True,
    )  # fmt: skip
    held = RobertaForCausalLM(config).state_dict()
    model = StreamedModel({**config.to_dict(), "architectures": ["RobertaForCausalLM"]}, held.__getitem__)
    question = Question("the cat sat on a mat " * 10, (" and", " then it"), 0, "7")
    found = answers(model, nstf.runtime.load_tokenizer(tiny.same), [question])
    assert all(math.isfinite(score) for score in found.scores[0])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (
            "XLMWithLMHeadModel",
            {
                "emb_dim": 64,
                "n_layers": 2,
                "n_heads": 4,
                "max_position_embeddings": 64,
                "embed_init_std": 0.5,
                "init_std": 0.2,
                "pad_index": 99,
            },
        ),
        (
            "XLNetLMHeadModel",
            {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 48, "initializer_range": 0.2},
        ),
    ],
)
def test_a_model_that_sees_the_answer_is_refused(tiny, kind: str, settings: dict[str, int]) -> None:
    """It was scored like others, with the choice and the padding in sight."""
    import transformers

    import nstf.runtime
    from nstf_convert.cli.eval_tasks import answers
    from nstf_convert.streamed import StreamedModel

    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    made = cls(cls.config_class(vocab_size=100, **settings))
    held = made.state_dict()
    model = StreamedModel({**made.config.to_dict(), "architectures": [kind]}, held.__getitem__)
    question = Question("the cat sat on", (" a mat", " the mat and"), 0, "7")
    with pytest.raises(UsageError, match="sees the tokens that it has to foretell"):
        answers(model, nstf.runtime.load_tokenizer(tiny.same), [question])


def test_spaces_that_are_missing_are_counted() -> None:
    right = Question("a cat", (" sat", ", and"), 0, "1")
    assert joined_without_space([right, Question("a cat", ("sat", " ran"), 0, "2")]) == 1


def test_an_exact_artifact_answers_as_its_reference(evaluate, tiny, questions) -> None:
    code, out, err = evaluate(
        tiny.same, "-r", tiny.folder, "--tasks", questions, "--max-flips", "0", "--json"
    )
    data = json.loads(out)
    assert code == 0 and err == "" and data["passed"] and "measured" not in data
    assert data["tasks"]["all"]["flips"] == 0 and data["tasks"]["all"]["questions"] == 4
    assert set(data["tasks"]["tasks"]) == {"a", "b"} and data["tasks"]["questions"][1]["id"] == "barn"
    for row in data["tasks"]["questions"]:
        assert row["log_likelihoods"] == pytest.approx(row["reference_log_likelihoods"], abs=1e-5)
        scores = row["log_likelihoods"]
        assert row["chosen"] == scores.index(max(scores))


def test_a_reference_that_computes_nan_is_refused(evaluate, tiny, questions, tmp_path) -> None:
    folder = shutil.copytree(tiny.folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": -100.0}))
    code, _, err = evaluate(tiny.same, "-r", folder, "--tasks", questions, "--max-flips", "1")
    assert code == 6 and "what is compared with computes NaN" in err


def test_gates_on_answers_exit_4_and_are_in_the_junit_file(evaluate, tiny, questions, tmp_path) -> None:
    junit = tmp_path / "o.xml"
    code, out, err = evaluate(
        tiny.coarse, "-r", tiny.folder, "--tasks", questions, "--min-accuracy", "1", "--min-accuracy-norm", "0",
        "--junit", junit,
    )  # fmt: skip
    assert code == 4 and "FAIL  accuracy" in out and "pass  length-normalised accuracy" in out
    assert "1 of 2 gates failed: accuracy" in err and "below 1 (--min-accuracy)" in err
    suite = ET.parse(junit).getroot().find("testsuite")
    assert [c.get("name") for c in suite.findall("testcase")] == ["min-accuracy", "min-accuracy-norm"]
    figures = {p.get("name"): p.get("value") for p in suite.find("properties")}
    assert figures["tasks_questions"] == "4" and "tasks_flips" in figures


def test_tasks_and_text_are_measured_in_one_run(evaluate, tiny, questions) -> None:
    code, out, _ = evaluate(
        tiny.coarse, "-r", tiny.folder, "--tasks", questions, "--dataset", tiny.text, "--windows", "2", "--seq-len",
        "32", "--max-kl", "100", "--limit", "2",
    )  # fmt: skip
    assert (
        code == 0 and "mean KLD" in out and "2 multiple-choice questions" in out and "flipped answers" in out
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--reference is missing"),
        (("--tasks", "q", "--max-flips", "0.1"), "--max-flips compares with the reference's answers"),
        (("--tasks", "q", "--min-accuracy", "2"), "--min-accuracy 2: give a number from 0 to 1"),
        (("--tasks", "q", "--max-kl", "0.1"), "gates on the divergence compare with a reference"),
        (("--tasks", "missing.jsonl"), "--tasks: no such file: missing.jsonl"),
        (("--tasks", "/dev/null"), "--tasks: /dev/null is no regular file"),
        (("--min-accuracy", "0.5", "-r", "model"), "--min-accuracy is about multiple choice"),
        (("--limit", "5", "-r", "model"), "--limit is about multiple choice"),
    ],
)
def test_options_that_ask_for_nothing_together_exit_2(evaluate, tiny, questions, words, message) -> None:
    given = [questions if w == "q" else tiny.folder if w == "model" else w for w in words]
    code, _, err = evaluate(tiny.same, *given)
    assert code == 2 and message in err


def test_a_text_of_one_token_is_refused():
    """Nothing stands before it that could foretell it: it ended in an error of torch's."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    merged = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merged)
    with pytest.raises(UsageError, match="make one token"):
        encode(tokenizer, Question("a", ("b", "bb"), 0, "1", ""), 16)

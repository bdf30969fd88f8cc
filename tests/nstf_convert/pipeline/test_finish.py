"""The last steps of a conversion: front to back, healing, and the windows that report."""

import pytest

from nstf.errors import UsageError
from nstf.runtime.artifact import open_artifact, verify
from nstf_convert.pipeline import convert


def test_the_last_steps_of_the_best_effort_are_kept_only_when_they_measure_better(default_options) -> None:
    chosen = default_options(("ratio", 0.4), effort="best", search_steps=1, heal_steps=4)
    report = convert(chosen).report["accuracy"]
    assert report["search"]["steps"] == 1
    assert [s["step"] for s in report["steps"]] == ["front to back", "healing"]
    for step in report["steps"]:
        assert step["kept"] == (step["after"] < step["before"])
    last = report["steps"][-1]
    assert report["selection"] == (last["after"] if last["kept"] else last["before"])
    assert report["healing"]["steps"] == 4
    verify(chosen.output)


def test_figures_are_of_windows_that_chose_nothing(converted, quick) -> None:
    accuracy = converted.result.report["accuracy"]
    assert accuracy["protocol"]["windows_that_choose"] > 0 < accuracy["protocol"]["windows_that_report"]
    assert accuracy["domains"] == {"text.txt": pytest.approx(accuracy["final"]["mean_kl"])}
    assert accuracy["selection"] != accuracy["final"]["mean_kl"]
    with open_artifact(converted.result.output) as artifact:
        stored = artifact.manifest.report["accuracy"]
    assert stored["domains"] == {"text.txt": pytest.approx(accuracy["domains"]["text.txt"], rel=1e-5)}
    with open_artifact(quick.result.output) as artifact:
        stored = artifact.manifest.report["accuracy"]
    assert stored["uniform"]["domains"].keys() == stored["domains"].keys()


def test_healing_of_a_model_that_cannot_be_run_is_refused_at_once(options, small, tmp_path) -> None:
    import json
    import shutil

    folder = tmp_path / "unknown"
    shutil.copytree(small.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "martian", "architectures": ["MartianForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="healing needs a model that can be run"):
        convert(options(("ratio", 0.6), model=str(folder), datasets=(), heal_minutes=1.0))

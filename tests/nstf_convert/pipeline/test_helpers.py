"""Further devices: the same bytes as with one, and a process that fails is no harm. Here both devices are the CPU."""

import logging
import os
from dataclasses import replace

import pytest
import torch

from nstf_convert.pipeline import convert
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline import session as sessions
from nstf_convert.pipeline.calibrate import make
from nstf_convert.pipeline.helpers import VISIBLE, Helpers, Job, _seeing_only, visible_name
from nstf_convert.pipeline.improve import front_to_back
from nstf_convert.pipeline.machine import machine

from .conftest import assert_not_worse_than_one_format

CPU = torch.device("cpu")


@pytest.fixture
def two_devices(monkeypatch) -> None:
    def found(*wanted):
        return replace(machine(*wanted), devices=(CPU, CPU))

    monkeypatch.setattr(sessions, "machine", found)


def test_two_devices_write_the_same_bytes_and_share_the_passes(
    default_options, converted, two_devices, monkeypatch, tmp_path
) -> None:
    # Hessians that are dropped do not change a byte, and their proposals are shared.
    monkeypatch.setattr(make, "HESSIAN_BYTES", 1000)
    passes = []
    run = front_to_back._Pass.run

    def counted(self, batches):
        passes.append(self.mix)
        run(self, batches)

    measured = []
    measure = mixes.measure_splits

    def counted_measure(session, test, splits, *windows):
        measured.extend(splits)
        return measure(session, test, splits, *windows)

    monkeypatch.setattr(front_to_back._Pass, "run", counted)
    monkeypatch.setattr(mixes, "measure_splits", counted_measure)
    report = convert(default_options(output=tmp_path / "two.nstf")).report
    assert (tmp_path / "two.nstf").read_bytes() == converted.content
    stages = [stage["name"] for stage in report["stages"]]
    assert "wait for other GPUs" in stages
    # The mix alone was encoded here; the best single format was found in the work directory.
    assert len(passes) == 1
    assert_not_worse_than_one_format(report["accuracy"])
    assert [s for s in measured if s == "report"] == ["report"]
    resources = report["resources"]
    assert [p["device"] for p in resources["peaks"]] == ["cpu", "cpu"]
    assert resources["host_peak_bytes"] == sum(p["host_bytes"] for p in resources["peaks"])


def test_a_helper_that_fails_is_told_once_and_its_work_is_done_here(
    default_options, converted, two_devices, monkeypatch, tmp_path, caplog
) -> None:
    start = Helpers.start

    def impossible(self, jobs):
        start(self, [Job({"no such tensor": job.mix[min(job.mix)]}, False) for job in jobs[:1]])

    monkeypatch.setattr(Helpers, "start", impossible)
    with caplog.at_level(logging.WARNING, "nstf"):
        convert(default_options(output=tmp_path / "two.nstf"))
    assert (tmp_path / "two.nstf").read_bytes() == converted.content
    told = [r.getMessage() for r in caplog.records if "another GPU's process failed" in r.getMessage()]
    assert len(told) == 1 and "no such tensor" in told[0]


@pytest.mark.parametrize("early", [False, True])
def test_a_helper_that_is_killed_is_noticed(early, default_options, tmp_path, caplog) -> None:
    two = replace(machine("cpu", None, None, 1), devices=(CPU, CPU))
    helpers = Helpers(default_options(), tmp_path / "nothing.work", two)
    try:
        process = helpers._processes[0][0]
        with caplog.at_level(logging.WARNING, "nstf"):
            if early:
                process.kill()
                process.join()
            helpers.start([Job({}, True)])
            process.kill()  # seconds before it could answer
            helpers.wait()
        assert not helpers.busy and "failed (it ended" in caplog.text
    finally:
        helpers.close()


@pytest.mark.parametrize(("visible", "wanted"), [(None, "1"), ("4,5", "5"), ("GPU-a, GPU-b", "GPU-b")])
def test_a_helper_sees_its_own_gpu_only(visible, wanted, monkeypatch) -> None:
    if visible is None:
        monkeypatch.delenv(VISIBLE[1], raising=False)
    else:
        monkeypatch.setenv(VISIBLE[1], visible)
    with _seeing_only(torch.device("cuda", 1)):
        assert os.environ[VISIBLE[1]] == wanted
    assert os.environ.get(VISIBLE[1]) == visible


def test_on_amd_the_variable_that_is_set_says_which_gpus_are_seen() -> None:
    assert (
        visible_name(True, {"HIP_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "0"})
        == "HIP_VISIBLE_DEVICES"
    )
    assert visible_name(True, {"CUDA_VISIBLE_DEVICES": "0"}) == "CUDA_VISIBLE_DEVICES"
    assert visible_name(False, {"HIP_VISIBLE_DEVICES": "4,5"}) == "CUDA_VISIBLE_DEVICES"


@pytest.mark.gpu
def test_a_gpu_writes_the_same_bytes_every_time_and_with_others_beside_it(default_options, tmp_path) -> None:
    count = torch.cuda.device_count()
    if count == 0:
        pytest.skip("no GPU is here")
    devices = ["cuda:0", "cuda:0", ",".join(["cuda:0", *map(str, range(1, count))])]
    for i, device in enumerate(devices):
        convert(default_options(device=device, output=tmp_path / f"{i}.nstf"))
    first, *others = [(tmp_path / f"{i}.nstf").read_bytes() for i in range(len(devices))]
    assert all(other == first for other in others)

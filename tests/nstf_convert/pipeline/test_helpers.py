"""Helpers: the same bytes as without, and one that fails is no harm. Here all devices are the CPU."""

import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nstf_convert.pipeline import convert
from nstf_convert.pipeline import helpers as helpers_module
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline import session as sessions
from nstf_convert.pipeline.calibrate import make
from nstf_convert.pipeline.calibrate.share import SharedStep
from nstf_convert.pipeline.helpers import Helpers, Job, count_beside
from nstf_convert.pipeline.improve import front_to_back
from nstf_convert.pipeline.machine import Machine, machine
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose import table
from nstf_convert.pipeline.propose.encoder import LOOKED_AT, Encoder
from nstf_convert.pipeline.propose.methods import method_families
from nstf_convert.pipeline.propose.rehearsal import rehearse
from nstf_convert.pipeline.session import Session

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
                process.wait()
            helpers.start([Job({}, True)])
            process.kill()  # seconds before it could answer
            helpers.wait()
        assert not helpers.busy and "failed (it ended" in caplog.text
    finally:
        helpers.close()


@pytest.fixture
def one_beside(monkeypatch) -> None:
    monkeypatch.setattr(sessions, "count_beside", lambda machine, checkpoint_bytes: 1)


def test_a_process_on_the_same_device_takes_candidates_and_the_layers_that_are_compared(
    default_options, converted, one_beside, monkeypatch, tmp_path
) -> None:
    jobs, taken, mixes, here = [], [], [], []
    start_all, tell, work = Helpers.start_all, Helpers._told, table._taken
    ahead, encode = Helpers.encode_ahead, Encoder.encode

    def once_it_began(self, job):
        start_all(self, job)
        claims = tmp_path / "two.nstf.work" / "claims"
        until = time.monotonic() + 120
        while not list(claims.glob("*")) and time.monotonic() < until:  # its door, and its first piece
            time.sleep(0.01)

    def told(self, connection, what):
        jobs.append(what.step if isinstance(what, SharedStep) else type(what).__name__)
        return tell(self, connection, what)

    def counted(session, units, *rest):
        found = work(session, units, *rest)
        taken.append((len(found), len(units)))
        return found

    def noted(self, wanted):
        mixes.extend(wanted)
        here.clear()
        ahead(self, wanted)

    def encoded(self, unit, recipe, *known):
        result = encode(self, unit, recipe, *known)
        if result.seconds:  # made, not found
            here.append((unit.name, recipe))
        return result

    monkeypatch.setattr(Helpers, "start_all", once_it_began)
    monkeypatch.setattr(Helpers, "_told", told)
    monkeypatch.setattr(Helpers, "encode_ahead", noted)
    monkeypatch.setattr(Encoder, "encode", encoded)
    monkeypatch.setattr(table, "_taken", counted)
    report = convert(default_options(output=tmp_path / "two.nstf")).report
    assert (tmp_path / "two.nstf").read_bytes() == converted.content
    assert jobs == ["Rehearsal", "candidates", "Encoding"]
    assert len(mixes) > 1 and not {(n, r) for mix in mixes for n, r in mix.items()} & set(here)
    assert len(taken) == 1 and taken[0][0] < taken[0][1]
    peaks = report["resources"]["peaks"]
    assert [p["device"] for p in peaks] == ["cpu", "cpu"]
    assert report["resources"]["host_peak_bytes"] == sum(p["host_bytes"] for p in peaks)


def test_a_process_on_the_same_device_takes_tensors_that_a_plan_gives_few_bits(
    default_options, monkeypatch, tmp_path
) -> None:
    taken, found, work, start_all = [], [], table._taken, Helpers.start_all

    def once_it_began(self, job):
        start_all(self, job)
        claims, before = tmp_path / "1.nstf.work" / "claims", time.monotonic()
        known = set(claims.glob("*"))
        while known == set(claims.glob("*")) and time.monotonic() < before + 120:
            time.sleep(0.001)

    def counted(*arguments):
        own = work(*arguments)
        taken.append((len(own), len(arguments[1])))
        return own

    monkeypatch.setattr(Helpers, "start_all", once_it_began)
    monkeypatch.setattr(table, "_taken", counted)
    for count in (0, 1):
        monkeypatch.setattr(sessions, "count_beside", lambda machine, checkpoint_bytes, count=count: count)
        formats = ("int_grid", "svd", "add")
        options = default_options(("bpw", 3.0), formats=formats, output=tmp_path / f"{count}.nstf")
        allowed = method_families(formats)
        with Session(options, Stages()) as session:
            units = list(table.build_table(session, allowed, lambda unit: None).candidates)
            assert session.beside.count == count
            low = [session.units[n] for n in units]
            more = table.at_few_bits(session, low, allowed, dict.fromkeys(units, 3.0))
            found.append((more, {u.name: session.encoder.looks(u, allowed) for u in low}))
    assert found[0] == found[1]
    assert any(look.reason == LOOKED_AT for looks in found[0][1].values() for look in looks)
    assert len(taken) == 2 and all(done < of for done, of in taken)


def test_nothing_waits_for_a_process_that_is_not_ready(
    default_options, converted, one_beside, monkeypatch, tmp_path
) -> None:
    begun = []
    start = Helpers.__init__

    def stopped(self, *arguments):
        start(self, *arguments)
        for process, _ in self._processes:
            os.kill(process.pid, signal.SIGSTOP)
            begun.append(process)

    monkeypatch.setattr(Helpers, "__init__", stopped)
    report = convert(default_options(output=tmp_path / "two.nstf")).report
    assert (tmp_path / "two.nstf").read_bytes() == converted.content
    assert len(begun) == 1 and begun[0].returncode == -signal.SIGKILL
    assert [p["gpu_bytes"] for p in report["resources"]["peaks"]] == [None, None]


def test_a_process_beside_that_dies_at_work_is_no_harm(
    default_options, converted, one_beside, monkeypatch, tmp_path, caplog
) -> None:
    start_all = Helpers.start_all

    def killed_when_it_began(self, job):
        start_all(self, job)
        claims = tmp_path / "two.nstf.work" / "claims"
        until = time.monotonic() + 120
        while len(list(claims.glob("*"))) < 2 and time.monotonic() < until:  # its door, and a piece
            time.sleep(0.001)
        self._processes[0][0].kill()

    monkeypatch.setattr(Helpers, "start_all", killed_when_it_began)
    with caplog.at_level(logging.INFO, "nstf"):
        convert(default_options(output=tmp_path / "two.nstf"))
    assert (tmp_path / "two.nstf").read_bytes() == converted.content
    assert "a process beside this one failed (it ended)" in caplog.text


def test_a_helper_ends_with_the_process_that_started_it(default_options, tmp_path) -> None:
    helpers = Helpers(default_options(), tmp_path / "nothing.work", machine("cpu", None, None, 1), 1)
    process, _ = helpers._processes[0]
    try:
        process.stdin.close()  # as the system does for a process that is killed
        assert process.wait(60) == 1
    finally:
        helpers.close()


@pytest.mark.parametrize(
    ("cores", "gpu", "host", "checkpoint", "count"),
    [
        (16, 100 << 30, 90 << 30, 269 << 20, 3),
        (8, 100 << 30, 90 << 30, 269 << 20, 1),
        (4, 100 << 30, 90 << 30, 269 << 20, 0),
        (16, 20 << 30, 90 << 30, 269 << 20, 0),
        (16, 100 << 30, 12 << 30, 269 << 20, 0),
        (16, 100 << 30, 90 << 30, 11 << 20, 0),
        (16, 100 << 30, 90 << 30, 2 << 30, 0),
    ],
)
def test_helpers_beside_need_cores_memory_and_a_small_model(cores, gpu, host, checkpoint, count) -> None:
    gpus = (torch.device("cuda", 0), torch.device("cuda", 1))
    assert count_beside(Machine(gpus[:1], cores, host, gpu), checkpoint) == count
    assert count_beside(Machine(gpus, cores, host, gpu), checkpoint) == 0
    assert count_beside(Machine((CPU,), cores, host, 0), checkpoint) == 0


def test_what_helpers_beside_may_take_is_not_the_first_process_s_until_they_end(
    default_options, monkeypatch, tmp_path
) -> None:
    given = replace(machine("cpu", None, None, 1), gpu_bytes=80 << 30)
    bounds = []
    monkeypatch.setattr(helpers_module, "keep_within", lambda size, devices: bounds.append(size))
    found = Helpers(default_options(), tmp_path / "nothing.work", given, 2)
    try:
        monkeypatch.setattr(Machine, "on_gpu", property(lambda self: True))
        assert bounds == []
        found.rehearse()
        assert bounds == [60 << 30]
    finally:
        found.close()
        found.close()
    assert bounds == [60 << 30, 80 << 30]


def test_one_process_beside_stays_and_gives_back_what_the_others_may_take(
    default_options, monkeypatch, tmp_path
) -> None:
    given = replace(machine("cpu", None, None, 1), gpu_bytes=80 << 30)
    bounds = []
    monkeypatch.setattr(helpers_module, "keep_within", lambda size, devices: bounds.append(size))
    found = Helpers(default_options(), tmp_path / "nothing.work", given, 3)
    try:
        monkeypatch.setattr(Machine, "on_gpu", property(lambda self: True))
        found.rehearse()
        found.keep_one()
        assert found.any and found.count == 1
        found._late |= {c for _, c in found._processes}  # nobody waits for one that did not begin
        found.keep_one()
        assert not found.any
    finally:
        found.close()
    assert bounds == [50 << 30, 70 << 30, 80 << 30]


def test_a_rehearsal_needs_no_calibration_and_leaves_nothing(default_options, tmp_path, monkeypatch) -> None:
    worked = []
    candidates = Encoder.candidates
    monkeypatch.setattr(
        Encoder, "candidates", lambda self, u, allowed: worked.append(candidates(self, u, allowed))
    )
    given = machine("cpu", None, None, 2)
    session = sessions.Session(default_options(output=tmp_path / "none.nstf"), sessions.Stages(), given=given)
    with session:
        names = rehearse(session)
        shapes = {session.units[n].inner_shape for n in names}
    assert len(names) == len(shapes) >= 3
    assert all(len(found) > 5 for found in worked)
    assert list(Path(tmp_path).iterdir()) == []


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

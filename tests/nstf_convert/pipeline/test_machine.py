"""What a conversion may use, what it is predicted to take, and how it tells where it is."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nstf.errors import UsageError
from nstf_convert.device_weights import DeviceWeights
from nstf_convert.pipeline import convert, prediction, progress
from nstf_convert.pipeline.calibrate import make as calibration
from nstf_convert.pipeline.calibrate.one_input import OneInput
from nstf_convert.pipeline.machine import BASE_BYTES, Machine, machine
from nstf_convert.pipeline.prediction import Text, predict
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.rates import Rates
from nstf_convert.pipeline.session import Session, minutes
from nstf_convert.report.resources import pairs

from .conftest import assert_not_worse_than_one_format

CPU = torch.device("cpu")
RATES = Rates(product=1e-11, element=1e-9, factor=1e-10, search=2e-6, round=1e-7, propose=0.2, launch=1e-6)


def small_machine(host_bytes: int = 4 << 30, threads: int = 4) -> Machine:
    return Machine((CPU,), threads, host_bytes, 0)


def test_what_waits_does_not_depend_on_what_happens_to_be_free() -> None:
    free = [Machine((CPU,), 4, n << 30, 0) for n in (16, 64)]
    assert free[0].activation_bytes == free[1].activation_bytes and not free[0].short
    # A stated bound decides, whether it is small or large; memory that is truly short does too, and is said to.
    stated = [Machine((CPU,), 4, n << 30, 0, stated=True) for n in (2, 16, 64)]
    assert stated[0].activation_bytes < free[0].activation_bytes < stated[2].activation_bytes
    assert not any(m.short for m in stated)
    assert small_machine(2 << 30).short
    gpus = [Machine((torch.device("cuda"),), 4, 8 << 30, n << 30) for n in (60, 100)]
    assert (gpus[0].activation_bytes, gpus[0].scratch_bytes) == (
        gpus[1].activation_bytes,
        gpus[1].scratch_bytes,
    )


def test_fewer_windows_than_asked_for_are_said_to_be_fewer(options, monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setattr(Machine, "activation_bytes", property(lambda self: 3 * 3 * 4 * 64 * 32))
    with Session(options(samples=12, work_dir=tmp_path / "work"), Stages()) as session:
        assert session.windows == {"calibration": 3}
        assert session.calibration is not None
        assert session.calibration.metadata["source"]["fit_windows"] == 3
    assert "calibration: 3 of 12 windows fit" in caplog.text


def test_fewer_tokens_at_a_time_than_usual_are_said_to_be_fewer(options, tmp_path, caplog) -> None:
    """Their sums are others, so a conversion that was interrupted may end with other bytes."""
    with Session(options(work_dir=tmp_path / "work"), Stages()) as session:
        usual = session.tokens_per_batch
        assert usual == session.machine.tokens_per_batch and "tokens at a time" not in caplog.text
        little = replace(session.machine, host_bytes=BASE_BYTES + (1 << 20), stated=True)
        session.machine = little
        assert session.tokens_per_batch < usual and "tokens at a time" not in caplog.text
        session.machine = replace(little, stated=False)
        assert session.tokens_per_batch == session.tokens_per_batch < usual
    assert caplog.text.count("tokens at a time fit") == 1


def test_a_calibration_of_little_memory_is_made_again_where_there_is_more(
    options, tmp_path, monkeypatch, caplog
) -> None:
    """It was taken over without a word: the file was neither that of little memory nor that of much."""
    made = []
    real = calibration.calibrate_model
    monkeypatch.setattr(calibration, "calibrate_model", lambda *a: made.append(a[5]) or real(*a))

    def source(short: bool, tokens: int) -> dict:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Machine, "short", property(lambda self: short))
            patch.setattr(Session, "tokens_per_batch", property(lambda self: tokens))
            with Session(options(work_dir=tmp_path / "work"), Stages()) as session:
                return session.calibration.metadata["source"]

    assert source(True, 64)["tokens_at_a_time"] == 64 and made == [64]
    assert source(True, 32)["tokens_at_a_time"] == 64 and made == [64], (
        "less memory changes nothing that is there"
    )
    assert "tokens_at_a_time" not in source(False, 2048) and made == [64, 2048]
    assert "tokens_at_a_time" not in source(False, 2048) and made == [64, 2048]


def test_threads_are_as_before_when_a_conversion_is_over(options, tmp_path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Session(options(threads=1), Stages()):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(UsageError):
            Session(options(threads=1, calibration=tmp_path / "none"), Stages())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_core_each_is_for_the_block_only_and_keeps_the_order() -> None:
    threads = torch.get_num_threads()
    with small_machine(threads=3).one_core_each() as each:
        assert list(each(lambda i: (i, torch.get_num_threads(), torch.is_grad_enabled()), range(5))) == [
            (i, 1, False) for i in range(5)
        ]
    assert torch.get_num_threads() == threads


def test_workers_are_as_many_as_fit_the_memory() -> None:
    room = 0.7 * ((4 << 30) - BASE_BYTES)
    assert small_machine().workers(1 << 20) == 4
    assert small_machine().workers(int(room / 2)) == 2
    assert small_machine().workers(100 << 30) == 1


@pytest.mark.parametrize(
    ("device", "memory", "gpu_memory", "message"),
    [
        ("tpu", None, None, "is not known: choose auto, cpu, cuda, cuda:1 or cuda:0,1"),
        ("cuda:0,0", None, None, "names a GPU twice"),
        ("cuda:0,99", None, None, r"this machine has \d+ GPUs"),
        ("cpu", 1000, None, "a bound of 1000 bytes of memory is too small"),
        ("cpu", None, 8 << 30, "a bound on GPU memory needs a GPU"),
    ],
)
def test_a_machine_that_is_not_there_is_one_clear_line(device, memory, gpu_memory, message) -> None:
    with pytest.raises(UsageError, match=message):
        machine(device, memory, gpu_memory, None)


def test_a_bound_on_memory_is_kept_and_reported(options) -> None:
    report = convert(options(("ratio", 0.5), memory=3 << 30, device="cpu")).report["resources"]
    assert report["host_bound_bytes"] == 3 << 30
    assert 0 < report["host_peak_bytes"] <= 3 << 30
    assert report["devices"] == ["cpu"] and report["gpu_peak_bytes"] is None
    assert report["windows"] == {"asked": 6, "calibrated": 6} and not report["memory_short"]
    lines = dict(pairs(report))
    assert lines["memory"].endswith("GiB at the peak, bound 3.00 GiB")
    assert lines["windows"] == "6 of 6 calibrated on"


def test_time_and_memory_are_predicted_before_anything_starts(converted) -> None:
    report = converted.result.report["resources"]
    assert report["predicted_seconds"] > 0 and report["predicted_host_bytes"] > 100 << 20
    assert report["seconds"] > 0


@pytest.fixture
def predicted(options, monkeypatch):
    """Predicts for a Llama of `layers` layers, 512 wide, on a machine of fixed rates; keyword arguments are options."""
    monkeypatch.setattr(prediction, "measured_rates", lambda *given: RATES)

    def one(
        text: Text = Text(16, 512), layers: int = 8, budget=("bpw", 4.0), drops: bool = False, devices: int = 1,
        **changes,
    ):  # fmt: skip
        shapes = {"q": (512, 512), "up": (1536, 512), "down": (512, 1536)}
        units = [
            Unit(f"model.layers.{i}.{role}.weight", shape, "bfloat16", role, uses=("linear",))
            for i in range(layers)
            for role, shape in shapes.items()
        ]
        units.append(Unit("embed.weight", (4096, 512), "bfloat16", "embedding", uses=("embedding", "head")))
        machine = replace(small_machine(), devices=(CPU,) * devices)
        chosen = options(budget, prefix=True, search=None, **changes)
        return predict(units, chosen, machine, 1 << 26, text, drops)

    return one


def test_more_text_and_more_layers_are_predicted_to_take_longer(predicted) -> None:
    few, many, deep = predicted(), predicted(Text(160, 512)), predicted(layers=80)
    assert many.seconds["calibration"] == pytest.approx(10 * few.seconds["calibration"], rel=0.2)
    assert many.total_seconds > few.total_seconds and many.host_bytes > few.host_bytes
    assert 8 < deep.seconds["candidates"] / few.seconds["candidates"] < 11


def test_layers_that_round_are_predicted_to_take_less_where_they_may(predicted, monkeypatch) -> None:
    exact, many_bits = predicted(), predicted(budget=("bpw", 8.0))
    fast = replace(RATES, layer=RATES.product / 8, moment=RATES.product / 3)
    monkeypatch.setattr(prediction, "measured_rates", lambda *_: fast)
    rounded, rounded_bits = predicted(), predicted(budget=("bpw", 8.0))
    step = "encode front to back"
    assert rounded.seconds["calibration"] < 0.8 * exact.seconds["calibration"]
    assert rounded.seconds["measure"] == exact.seconds["measure"]
    # Of many bits the forward passes are exact, and second moments alone are faster.
    saved, of_moments = (
        exact.seconds[step] - rounded.seconds[step],
        many_bits.seconds[step] - rounded_bits.seconds[step],
    )
    assert saved > of_moments > 0


def test_two_devices_are_predicted_to_share_what_they_do(predicted) -> None:
    one, two = (predicted(drops=True, devices=n).seconds for n in (1, 2))
    assert two["candidates"] == pytest.approx(one["candidates"] / 2) and two["candidates"] > 0
    assert one["calibration"] / 2 < two["calibration"] < 0.75 * one["calibration"]


def test_the_prediction_counts_what_the_options_ask_for(predicted) -> None:
    plain = predicted()
    assert predicted(Text(16, 512, done=True)).seconds["calibration"] == 0.0
    searched = predicted(search_steps=6)
    assert searched.total_seconds > plain.total_seconds
    assert predicted(search_steps=60).seconds["search"] == pytest.approx(10 * searched.seconds["search"])
    assert predicted(search_minutes=3.0).seconds["search"] == 180.0
    assert predicted(heal_minutes=2.0).seconds["heal"] == 120.0
    bound = predicted(budget=("max_kl", 0.01))
    assert bound.seconds["encode"] > bound.seconds["encode front to back"] / 2
    # Without Hessians tensors cannot be encoded on their own, so single formats are not compared.
    assert predicted(drops=True).seconds["compare formats"] == 0.0 < plain.seconds["compare formats"]


# Of a network whose convolutions run at 1024 places.
IMAGE = OneInput(seconds=0.01, kept_bytes=1 << 20, places=1024, columns=1 << 20, squares=1 << 29)


def test_a_step_of_healing_reads_many_inputs_where_the_model_is_no_language_model(predicted) -> None:
    def step(text: Text) -> float:
        steps = [predicted(text, heal_steps=n).seconds["heal"] for n in (10, 20, 30)]
        assert steps[1] - steps[0] == pytest.approx(steps[2] - steps[1])
        assert 0 < steps[1] - steps[0] < steps[0]  # looks take time too
        return steps[1] - steps[0]

    assert step(Text(16, 1, one=IMAGE)) == pytest.approx(10 * 5 * 32 * IMAGE.seconds)
    assert step(Text(16, 512)) == pytest.approx(2 * step(Text(16, 256)), rel=0.2)


def test_other_models_take_the_time_of_their_own_forward_pass(predicted) -> None:
    slow = replace(IMAGE, seconds=10 * IMAGE.seconds)
    few, many, late = (
        predicted(t) for t in (Text(16, 1, one=IMAGE), Text(160, 1, one=IMAGE), Text(16, 1, one=slow))
    )
    assert few.seconds["measure"] > 0 and late.seconds["measure"] == pytest.approx(
        10 * few.seconds["measure"]
    )
    assert many.seconds["calibration"] > 5 * few.seconds["calibration"] > 0
    assert predicted(Text(16, 1, measured=32, one=IMAGE)).seconds["measure"] == pytest.approx(
        4 * few.seconds["measure"]
    )


def test_healing_takes_memory_by_its_inputs_and_codes(predicted) -> None:
    def healed(kept: int) -> int:
        text = Text(2, 1, one=replace(IMAGE, kept_bytes=kept))
        return predicted(text, heal_steps=3).host_bytes

    small = healed(20 << 20)
    assert small > BASE_BYTES + 24 * 8 * 512 * 3584 + 32 * (20 << 20)
    assert healed(24 << 20) - small == 32 * (4 << 20)
    # A step is taken in parts above what the run keeps, which the bound on memory makes less; one input is the least.
    room = min(3 << 29, small_machine().activation_bytes)
    assert healed(1 << 28) - small == room - 32 * (20 << 20)
    assert healed(1 << 33) - small == (1 << 33) - 32 * (20 << 20)


def test_times_are_told_as_people_say_them() -> None:
    assert [minutes(s) for s in (0.2, 42, 600, 7500)] == ["1 s", "42 s", "10 min", "2 h 5 min"]


def test_the_time_of_a_stage_inside_another_counts_once(monkeypatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0])
    monkeypatch.setattr(progress, "time", clock)
    stages = Stages()
    with stages.stage("outer"):
        now[0] += 1
        with stages.stage("inner"):
            now[0] += 30
        now[0] += 2
        with stages.stage("inner"):
            now[0] += 10
    assert [(s.name, s.seconds) for s in stages.done] == [("inner", 40), ("outer", 3)]


def test_signatures_are_made_when_asked_for_in_a_stage_of_their_own(options) -> None:
    plain = convert(options(("ratio", 0.5), formats=("int_grid",))).report
    assert not any(t["signature"] for t in plain["tensors"])
    asked = convert(options(("ratio", 0.5), formats=("int_grid",), signatures=True, force=True)).report
    assert any(t["signature"] for t in asked["tensors"])
    names = [[s["name"] for s in report["stages"]] for report in (plain, asked)]
    assert "signatures" in names[1] and [n for n in names[1] if n != "signatures"] == names[0]


def test_weights_stay_on_the_device_within_their_budget() -> None:
    asked: list[str] = []

    def source(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.full((4,), float(name))

    weights = DeviceWeights(source, CPU, budget_bytes=32)
    for name in ("1", "2", "1", "2", "3", "2", "1"):
        assert weights(name)[0] == float(name)
    # Two of 16 bytes fit: the third takes the place of the one that was used longest ago.
    assert asked == ["1", "2", "3", "1"]
    weights.drop("1")
    weights("1")
    assert asked[-1] == "1" and len(asked) == 5


def test_what_is_read_ahead_follows_the_direction_of_the_layers() -> None:
    names = ["embed", *(f"layers.{i}.{n}" for i in range(4) for n in ("q", "o")), "head"]
    weights = DeviceWeights(lambda name: torch.zeros(4), CPU, budget_bytes=0)
    weights.read_ahead(dict.fromkeys(names, 4))
    coming = {name: weights._coming(name)[:3] for name in names[:-1]}
    assert coming["embed"] == names[1:4] and coming["layers.0.o"] == names[3:6]
    # The gradients' way: each layer is computed again, the last one first.
    assert weights._coming("layers.3.q")[:3] == ["layers.3.o", "layers.2.q", "layers.2.o"]
    assert weights._coming("layers.3.o")[:2] == ["layers.2.q", "layers.2.o"]
    assert weights._coming("layers.2.q")[:2] == ["layers.2.o", "layers.1.q"]
    weights._coming("layers.0.q")
    weights._coming("embed")
    assert weights._coming("layers.0.q")[:2] == ["layers.0.o", "layers.1.q"], "the next batch goes forward"


def test_weights_that_were_never_read_are_read_ahead_by_their_size() -> None:
    """Also behind a table that is larger than all that may be read ahead."""
    names = {"embed": 1000, **{f"layers.{i}.{n}": 50 for i in range(2) for n in ("q", "o")}}
    weights = DeviceWeights(
        lambda name: torch.zeros(names[name], dtype=torch.float16), CPU, budget_bytes=1000
    )
    weights.read_ahead(names)
    asked = []

    class Pool(ThreadPoolExecutor):
        def submit(self, work, name):
            asked.append(name)
            return super().submit(lambda: weights._read(name))

    with Pool(1) as weights._pool:
        weights("embed")
        weights._read_ahead("embed")
    assert asked == ["layers.0.q", "layers.0.o"], "100 bytes each, and a quarter of 1000 at a time"


def test_large_hessians_are_used_and_not_stored(default_options, converted, monkeypatch, tmp_path) -> None:
    from nstf_convert.pipeline.calibrate import make

    monkeypatch.setattr(make, "HESSIAN_BYTES", 1000)
    dropped = convert(default_options(work_dir=tmp_path / "work"))
    assert dropped.output.read_bytes() == converted.content
    sizes = [folder / "calibration.safetensors" for folder in (tmp_path / "work", converted.work)]
    assert sizes[0].stat().st_size < sizes[1].stat().st_size


def test_without_hessians_tensors_are_encoded_where_their_inputs_are_made_again(options, monkeypatch) -> None:
    from nstf_convert.pipeline.calibrate import make

    monkeypatch.setattr(make, "HESSIAN_BYTES", 1000)
    report = convert(options(("ratio", 0.4), formats=("int_grid", "grid16"))).report
    assert_not_worse_than_one_format(report["accuracy"])
    assert "encode" in [s["name"] for s in report["stages"]]
    assert "encode front to back" not in [s["name"] for s in report["stages"]]
    windows = report["resources"]["windows"]
    assert windows["encode"] == windows["calibrated"] and "front_to_back" not in windows


def test_another_effort_in_the_same_work_directory_is_another_job(options, tmp_path) -> None:
    work = tmp_path / "work"
    convert(options(("ratio", 0.5), samples=None, effort="fast", work_dir=work, seq_len=16))
    with pytest.raises(UsageError, match=r"another job \(.*samples was 16, now 64\)"):
        convert(
            options(("ratio", 0.5), samples=None, effort="balanced", work_dir=work, seq_len=16, force=True)
        )


def test_hessians_that_are_wanted_after_all_are_made_again(options, monkeypatch, tmp_path) -> None:
    from nstf_convert.pipeline.calibrate import make

    monkeypatch.setattr(make, "HESSIAN_BYTES", 1000)
    settings = {"work_dir": tmp_path / "work", "formats": ("int_grid", "grid16")}
    convert(options(("ratio", 0.4), **settings))
    report = convert(options(("ratio", 0.4), search=True, search_steps=1, force=True, **settings)).report
    assert report["accuracy"]["search"]["steps"] == 1


def test_fewer_windows_than_were_calibrated_on_keep_their_token_weights(
    options, monkeypatch, tmp_path
) -> None:
    from nstf_convert.pipeline.improve import front_to_back

    seen = []
    real = front_to_back._Pass._token_weights

    def watched(self, group, rows):
        found = real(self, group, rows)
        seen.append((sum(r.shape[0] for r in rows), found is not None))
        return found

    monkeypatch.setattr(front_to_back._Pass, "_token_weights", watched)
    monkeypatch.setattr(Machine, "activation_bytes", property(lambda self: 300_000))
    report = convert(options(("ratio", 0.5), prefix=True, samples=12, work_dir=tmp_path / "work")).report
    windows = report["resources"]["windows"]
    assert report["resources"]["memory_short"]
    assert 4 <= windows["front_to_back"] < windows["calibrated"] == windows["asked"] == 12
    assert f"12 of 12 calibrated on, {windows['front_to_back']} front to back" in str(
        pairs(report["resources"])
    )
    tokens = {n for n, _ in seen}
    assert max(tokens) < 12 * 32 and any(weighted for _, weighted in seen)


def test_datasets_take_turns_among_the_windows(options, small, tmp_path) -> None:
    second = tmp_path / "second.txt"
    second.write_text(" ".join(reversed(small.text.read_text().split())))  # the same text twice is refused
    session = Session(options(datasets=(str(small.text), str(second)), work_dir=tmp_path / "work"), Stages())
    try:
        assert session.calibration is not None
        assert session.calibration.metadata["domains"]["fit"][:4] == ["text.txt", "second.txt"] * 2
    finally:
        session._opened.close()


def test_a_gpu_is_predicted_to_walk_the_columns_of_several_groups_side_by_side() -> None:
    layer = [(4096, 25 << 20), (4096, 16 << 20), (4096, 112 << 20), (14336, 56 << 20)]
    work = SimpleNamespace(groups=32 * layer, segments=27_000_000, cubes=0, tables=0)
    rates = replace(RATES, few_segments=16 * 150e-6, segment=1e-8)
    alone = prediction._encode_together(work, rates, 0.0, 1)
    assert alone == pytest.approx(32 * (3 * 4096 + 14336) * 150e-6 + 0.27)
    several = prediction._encode_together(work, rates, 0.0, 22 << 30)
    assert 0.17 * alone < several < 0.22 * alone
    # With memory for all of it the multiprocessors are what there is too few of. Tables are searched apart.
    all_at_once = prediction._encode_together(work, replace(rates, segment=1e-6), 0.0, 1 << 50)
    assert all_at_once == pytest.approx(27.0 + 14336 * 150e-6)
    work.tables = 1_000_000
    tables = prediction._encode_together(work, replace(rates, segment=1e-6), 0.0, 1 << 50) - all_at_once
    assert tables == pytest.approx(1e6 * rates.search)
    assert prediction._encode_together(work, RATES, 3.0, 1 << 50) == 3.0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shuffles", [False, True])
def test_activations_that_wait_are_counted_once_where_one_model_runs(
    device: str, shuffles: bool, options, monkeypatch
) -> None:
    rates = replace(RATES, few_segments=1e-6) if shuffles and device == "cuda" else RATES
    monkeypatch.setattr(prediction, "measured_rates", lambda *given: rates)
    units = [
        Unit(f"model.layers.{i}.mlp.up_proj.weight", (4096, 4096), "bfloat16", "up", uses=("linear",))
        for i in range(32)
    ]
    known = Machine((torch.device(device),), 4, 32 << 30, 100 << 30 if device == "cuda" else 0)

    def taken(windows: int) -> int:
        asked = options(("bpw", 3.0), prefix=False, search=None)
        found = predict(units, asked, known, 1 << 30, Text(windows, 512), True)
        return found.gpu_bytes if device == "cuda" else found.host_bytes

    assert 48 * 512 * 8 * 4096 <= known.activation_bytes
    if shuffles and device == "cuda":
        # Groups that wait for each other have what the activations leave; without codes that gain from it none wait.
        with_groups = taken(32)
        monkeypatch.setattr(prediction, "measured_rates", lambda *given: RATES)
        assert with_groups - taken(32) > prediction._work(units).working
    else:
        assert taken(48) - taken(32) == 16 * 512 * 8 * 4096

"""What a process has set in torch is put aside, and is as it was afterwards."""

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nstf.runtime.torch_state import _Settings, usual_process, usual_thread

BACKENDS: Any = torch.backends
MODULES = (
    BACKENDS, BACKENDS.mkldnn, BACKENDS.cudnn, BACKENDS.mkldnn.matmul, BACKENDS.mkldnn.conv, BACKENDS.mkldnn.rnn,
    BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn,
)  # fmt: skip
READ: tuple[Callable[[], Any], ...] = (
    torch.get_float32_matmul_precision,
    lambda: BACKENDS.cuda.matmul.allow_tf32,
    lambda: BACKENDS.cudnn.allow_tf32,
    lambda: BACKENDS.cuda.matmul.allow_bf16_reduced_precision_reduction,
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
)


def state() -> list[Any]:
    found: list[Any] = [module.fp32_precision for module in MODULES]
    for read in READ:
        try:
            found.append(read())
        except RuntimeError:  # older and newer settings do not agree
            found.append("mixed")
    return found


def _meant(found: list[Any]) -> list[Any]:
    """`none` and `ieee` are the same of a product."""
    return [v if v != "ieee" else "none" for v in found]


def setters() -> list[Callable[[], Any]]:
    out: list[Callable[[], Any]] = [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
        lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
        lambda: setattr(BACKENDS.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    ]
    out += [lambda n=n: torch.set_float32_matmul_precision(n) for n in ("medium", "high", "highest")]
    for module in MODULES:
        cuda = module in (BACKENDS.cudnn, *MODULES[6:])
        for value in ("none", "ieee", "tf32") if cuda else ("none", "ieee", "bf16"):
            out.append(lambda m=module, v=value: setattr(m, "fp32_precision", v))
    return out


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    settings = _Settings()
    settings.put_aside()
    yield
    settings.put_back()


def test_all_of_a_process_is_usual_inside_and_as_it_was_afterwards() -> None:
    usual, choice, known = state(), random.Random(0), setters()
    for _ in range(300):
        for change in choice.choices(known, k=choice.randint(1, 4)):
            change()
        before = state()
        with usual_process():
            found = state()
            assert _meant(found) == usual
            torch.set_float32_matmul_precision(choice.choice(("medium", "highest")))
        assert state() == before


def test_all_of_a_thread_too() -> None:
    def makes() -> tuple[Any, ...]:
        made = torch.ones(2, 2)
        return made.device.type, (made @ made).dtype, made.is_inference(), torch.is_grad_enabled()

    wanted = ("cpu", torch.float32, False, True)
    assert makes() == wanted
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        with usual_thread():
            assert makes() == wanted
        assert makes() == ("meta", torch.float32, True, False)
    torch.set_default_device("cuda:7")
    try:
        with usual_thread():
            assert makes() == wanted
    finally:
        torch.set_default_device(None)


def test_threads_take_turns() -> None:
    """The first to end left its own state to the other, and that one's to the process."""
    torch.set_float32_matmul_precision("medium")
    before, entered, found = state(), threading.Event(), []

    def other() -> None:
        with usual_process():
            entered.set()
            found.append(_meant(state()))

    with usual_process():
        inside = _meant(state())
        thread = threading.Thread(target=other)
        thread.start()
        assert not entered.wait(0.2)
        with usual_process():  # this thread may
            assert _meant(state()) == inside
    thread.join(30)
    assert found == [inside] and inside != _meant(before)
    assert state() == before


def test_what_cannot_be_set_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision("medium")
    before = state()

    def broken(dtype: torch.dtype) -> None:
        if dtype == torch.float32:
            monkeypatch.undo()
            raise RuntimeError("not here")

    monkeypatch.setattr(torch, "set_default_dtype", broken)
    with pytest.raises(RuntimeError, match="not here"), usual_process():
        raise AssertionError
    assert state() == before
    with usual_process():
        assert torch.get_default_dtype() == torch.float32


def test_what_is_put_aside_imports_no_compiler() -> None:
    code = (
        "import sys\nfrom nstf.runtime.torch_state import usual_process\n"
        "with usual_process(): pass\n"
        "print(sorted({'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

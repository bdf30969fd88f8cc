"""What a process has set in torch, put aside while ours is computed: results follow from files and options alone."""

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_BACKENDS: Any = torch.backends
# Precision of products of float32, and what torch begins with. The wider settings first: where a narrower one is not set
# itself, it reads as the wider one.
_PRECISIONS = (
    (_BACKENDS, "none"),
    (_BACKENDS.mkldnn, "none"),
    (_BACKENDS.cudnn, "none"),
    (_BACKENDS.mkldnn.matmul, "none"),
    (_BACKENDS.mkldnn.conv, "none"),
    (_BACKENDS.mkldnn.rnn, "none"),
    (_BACKENDS.cuda.matmul, "none"),
    (_BACKENDS.cudnn.conv, "tf32"),
    (_BACKENDS.cudnn.rnn, "tf32"),
)
# Of cuBLAS.
_FLAGS = (
    ("allow_fp16_accumulation", False),
    ("allow_fp16_reduced_precision_reduction", True),
    ("allow_bf16_reduced_precision_reduction", True),
)

# Settings are the process's. The same thread may come again.
_TURNS = threading.RLock()
_log = logging.getLogger("nstf")


@contextmanager
def usual_thread() -> Iterator[None]:
    """In this thread tensors are made on the CPU, autocast and inference mode are off, and gradients on."""
    with ExitStack() as stack:
        if not _makes_on_cpu():  # only then: it costs time at every call
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def usual_process() -> Iterator[None]:
    """In all threads: float32 by default, its products as precise as torch makes them unasked, any order of sums.

    Afterwards everything is as it was, also what was changed inside. Threads take turns.
    """
    if not _TURNS.acquire(blocking=False):
        _log.info("another thread of this process converts or exports: this one begins when it has ended")
        _TURNS.acquire()
    try:
        settings = _Settings()
        try:
            settings.put_aside()
            yield
        finally:
            settings.put_back()
    finally:
        _TURNS.release()


class _Settings:
    """What the process had set; `put_back` needs no more of it than `put_aside` came to."""

    def __init__(self) -> None:
        self.dtype = torch.get_default_dtype()
        self.strict = _strict()
        self.precisions: list[str] = []
        self.convolutions: bool | None = None
        self.products: str | None = None
        self.flags: list[Any] = []

    def put_aside(self) -> None:
        for module, usual in _PRECISIONS:
            self.precisions.append(str(module.fp32_precision))
            _put(module, "fp32_precision", usual)
        try:
            self.convolutions = _BACKENDS.cudnn.allow_tf32
        except RuntimeError:  # the new setting, made usual above, and this older one do not agree
            self.convolutions = False
        self.products = torch.get_float32_matmul_precision()
        self.flags = [getattr(_BACKENDS.cuda.matmul, name) for name, _ in _FLAGS]
        _put(_BACKENDS.cudnn, "allow_tf32", True)
        if self.products != "highest":
            torch.set_float32_matmul_precision("highest")
        for name, usual_flag in _FLAGS:
            _put(_BACKENDS.cuda.matmul, name, usual_flag)
        torch.set_default_dtype(torch.float32)
        if self.strict[0]:
            # The function named for this imports torch's compiler, seconds before anything is done.
            torch.set_deterministic_debug_mode("default")

    def put_back(self) -> None:
        if _strict() != self.strict:
            torch.use_deterministic_algorithms(self.strict[0], warn_only=self.strict[1])
        torch.set_default_dtype(self.dtype)
        for (name, _), flag in zip(_FLAGS, self.flags, strict=False):
            _put(_BACKENDS.cuda.matmul, name, flag)
        # The older settings change the newer ones.
        for module, _ in _PRECISIONS[: min(3, len(self.precisions))]:
            _put(module, "fp32_precision", "none")
        if self.products is not None:
            torch.set_float32_matmul_precision(self.products)
        if self.convolutions is not None:
            _put(_BACKENDS.cudnn, "allow_tf32", self.convolutions)
        for (module, _), before in reversed(list(zip(_PRECISIONS, self.precisions, strict=False))):
            _put(module, "fp32_precision", before)


def _strict() -> tuple[bool, bool]:
    """(whether only deterministic operations are allowed, whether others are warned of and no more)"""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _put(module: Any, name: str, value: object) -> None:
    try:
        if getattr(module, name) == value:
            return
    except RuntimeError:  # an older and a newer setting do not agree
        pass
    setattr(module, name, value)


def _makes_on_cpu() -> bool:
    try:
        return torch.get_default_device().type == "cpu"
    except (RuntimeError, AssertionError):  # a GPU that is not there
        return False

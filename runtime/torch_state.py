"""What a process has set in torch, put aside while ours is computed: results follow from files and options alone."""

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

    Afterwards everything is as it was, also what was changed inside.
    """
    dtype = torch.get_default_dtype()
    strict = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    precisions = []
    for module, usual in _PRECISIONS:
        precisions.append(str(module.fp32_precision))
        _put(module, "fp32_precision", usual)
    try:
        convolutions = _BACKENDS.cudnn.allow_tf32
    except RuntimeError:  # the new setting, made usual above, and this older one do not agree
        convolutions = False
    products = torch.get_float32_matmul_precision()
    flags = [getattr(_BACKENDS.cuda.matmul, name) for name, _ in _FLAGS]
    try:
        _put(_BACKENDS.cudnn, "allow_tf32", True)
        if products != "highest":
            torch.set_float32_matmul_precision("highest")
        for name, usual_flag in _FLAGS:
            _put(_BACKENDS.cuda.matmul, name, usual_flag)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        yield
    finally:
        torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])
        torch.set_default_dtype(dtype)
        for (name, _), flag in zip(_FLAGS, flags, strict=True):
            _put(_BACKENDS.cuda.matmul, name, flag)
        # The older settings change the newer ones.
        for module, _ in _PRECISIONS[:3]:
            _put(module, "fp32_precision", "none")
        torch.set_float32_matmul_precision(products)
        _put(_BACKENDS.cudnn, "allow_tf32", convolutions)
        for (module, _), before in reversed(list(zip(_PRECISIONS, precisions, strict=True))):
            _put(module, "fp32_precision", before)


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

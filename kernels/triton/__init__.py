"""Kernels in Triton, one source for NVIDIA and AMD GPUs. Absent without triton; every caller has a torch path."""

from importlib.util import find_spec

AVAILABLE = find_spec("triton") is not None

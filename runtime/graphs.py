"""Captured graphs (CUDA or HIP) of a step that is run again and again on the same memory."""

from collections.abc import Callable

import torch

Step = Callable[[], None]


class Graphs:
    """Captures steps on one stream into one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Runs the step once, which compiles and loads its kernels, and captures it."""
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                step()
            torch.cuda.current_stream().wait_stream(self.stream)
            # The library's workspace of this stream must be the graph's own: others free theirs when they capture.
            _clear_workspaces()
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device.
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                step()
            _clear_workspaces()
        replay: Step = graph.replay
        return replay


def _clear_workspaces() -> None:
    """Forgets the memory that cuBLAS (hipBLAS) was given: the next product takes new memory."""
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


class same_draws:
    """Leaves the random numbers of a device as they were: capturing a step draws some."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        on_gpu = self.device.type == "cuda"
        self.state = torch.cuda.get_rng_state(self.device) if on_gpu else torch.get_rng_state()

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.state, self.device)
        else:
            torch.set_rng_state(self.state)

"""How long a conversion will take and what memory, before it starts."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """seconds: by stage; host_bytes, gpu_bytes: peaks."""

    seconds: Mapping[str, float]
    host_bytes: int
    gpu_bytes: int

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

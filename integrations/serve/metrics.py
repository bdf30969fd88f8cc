"""Counters of the server in Prometheus' text format."""

from collections.abc import Callable
from threading import Lock

# Seconds, for the time to the first token and the whole of a request.
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_HELP = {
    "requests_total": ("counter", "Requests by path and status."),
    "prompt_tokens_total": ("counter", "Tokens of prompts."),
    "cached_tokens_total": ("counter", "Tokens of prompts whose keys and values were already there."),
    "generated_tokens_total": ("counter", "Tokens of answers."),
    "cancelled_total": ("counter", "Answers that a client left."),
    "steps_total": ("counter", "Passes over the weights."),
    "first_token_seconds": ("histogram", "From a request to its first token."),
    "request_seconds": ("histogram", "From a request to its end."),
    "running": ("gauge", "Sequences that are decoded now."),
    "waiting": ("gauge", "Requests in the queue."),
    "cache_bytes": ("gauge", "Bytes of keys and values."),
}


class Metrics:
    """Counters and histograms that several threads add to; gauges are asked for when they are read."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counters: dict[tuple[str, str], float] = {}
        self._times: dict[str, list[float]] = {}
        self.gauges: dict[str, Callable[[], float]] = {}

    def add(self, name: str, amount: float = 1, labels: str = "") -> None:
        with self._lock:
            self._counters[name, labels] = self._counters.get((name, labels), 0) + amount

    def time(self, name: str, seconds: float) -> None:
        """Adds a value to a histogram: counts up to each bucket, then the count of all and the sum."""
        with self._lock:
            row = self._times.setdefault(name, [0.0] * (len(BUCKETS) + 2))
            for i, bound in enumerate(BUCKETS):
                row[i] += seconds <= bound
            row[-2] += 1
            row[-1] += seconds

    def value(self, name: str, labels: str = "") -> float:
        with self._lock:
            return self._counters.get((name, labels), 0)

    def text(self) -> str:
        """All of them, as Prometheus reads them."""
        with self._lock:
            counters, times = dict(self._counters), {k: list(v) for k, v in self._times.items()}
        lines = []
        for name, (kind, help_) in _HELP.items():
            full = f"nstf_{name}"
            lines += [f"# HELP {full} {help_}", f"# TYPE {full} {kind}"]
            if kind == "gauge":
                lines += [f"{full} {_number(self.gauges[name]())}"] if name in self.gauges else []
            elif kind == "counter":
                found = sorted((labels, v) for (n, labels), v in counters.items() if n == name)
                lines += [
                    f"{full}{{{labels}}} {_number(v)}" if labels else f"{full} {_number(v)}"
                    for labels, v in found
                ]
            else:
                row = times.get(name, [0.0] * (len(BUCKETS) + 2))
                lines += [
                    f'{full}_bucket{{le="{b}"}} {_number(v)}' for b, v in zip(BUCKETS, row, strict=False)
                ]
                lines += [f'{full}_bucket{{le="+Inf"}} {_number(row[-2])}']
                lines += [f"{full}_sum {row[-1]!r}", f"{full}_count {_number(row[-2])}"]
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)

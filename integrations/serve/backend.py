"""What the ways of decoding share: the queue, who may wait in it, and the thread that takes from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from threading import Condition

from nstf.integrations.serve.errors import ApiError
from nstf.integrations.serve.metrics import Metrics
from nstf.integrations.serve.output import Answer
from nstf.integrations.serve.worker import Worker


class Backend(ABC):
    """`parallel` answers run and `queue` wait; a thread decodes, in `_loop`.

    `_changed` guards what several threads change: the queue, `_stopping`, and `left` of an answer.
    """

    name: str
    context: int
    vocab: int
    # Tokens of an answer whose request states none, where no context bounds it.
    usual_most: int | None = None

    def __init__(self, parallel: int, queue: int, metrics: Metrics) -> None:
        self._parallel, self._queue_size = parallel, queue
        self._waiting: deque[Answer] = deque()
        self._metrics = metrics
        self._changed = Condition()
        self._stopping = False
        metrics.gauges["running"] = self._running
        metrics.gauges["waiting"] = lambda: len(self._waiting)
        self._thread = Worker(self._loop)

    @abstractmethod
    def _loop(self) -> None:
        """Decodes until `_stopping`; whoever runs then is told."""

    @abstractmethod
    def _running(self) -> int:
        """Answers that are decoded now."""

    @abstractmethod
    def _refuse(self, answer: Answer) -> None:
        """Raises ApiError (400) for an answer that this way of decoding cannot give."""

    def submit(self, answer: Answer) -> None:
        """Puts an answer into the queue. Raises ApiError: 400 for what it cannot give, 429 when the queue is full, 503 when
        the server stops.
        """
        self._refuse(answer)
        with self._changed:
            self._check_room()
            self._waiting.append(answer)
            self._changed.notify()

    def check_room(self) -> None:
        """Raises what `submit` would raise now, whatever the answer."""
        with self._changed:
            self._check_room()

    def _check_room(self) -> None:
        if self._stopping:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if len(self._waiting) >= self._queue_size + self._parallel - self._running():
            running = "answer is" if self._parallel == 1 else "answers are"
            raise ApiError(
                429,
                f"the server is busy: {self._parallel} {running} running and {self._queue_size} are waiting; "
                "try again later",
                code="queue_full",
            )

    def cancel(self, answer: Answer) -> None:
        """Its client left: the answer leaves the queue, or ends before the next token."""
        with self._changed:
            answer.left = True
            if answer in self._waiting:
                self._waiting.remove(answer)
                answer.finished = True
                self._metrics.add("cancelled_total")
            self._changed.notify()

    def close(self, wait_s: float = 5.0) -> None:
        """Ends all answers and the thread."""
        with self._changed:
            self._stopping = True
            for answer in self._waiting:
                answer.fail("the server is shutting down")
            self._waiting.clear()
            self._changed.notify()
        self._thread.join(wait_s)

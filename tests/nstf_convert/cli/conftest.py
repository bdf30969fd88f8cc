import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from nstf_convert.cli import run


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def nstf(capsys) -> Callable[..., Result]:
    """Runs the command in this process: nstf("convert", model, "--budget", "0.5") -> code, stdout, stderr."""

    def call(*words: object) -> Result:
        capsys.readouterr()
        code = run([str(w) for w in words])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def pipeline(monkeypatch):
    """Replaces the pipeline by one that records its options, for tests of the command line alone."""
    from nstf_convert import pipeline as real

    class Recorded:
        options: Any = None
        error: BaseException | None = None
        report: Any = None
        content: bytes = b"artifact"

        def convert(self, options: Any, done: Any = lambda result: None) -> Any:
            self.options = options
            if self.error is not None:
                raise self.error
            options.output.write_bytes(self.content)
            result = real.ConvertResult(options.output, 8, 16, self.report or {})
            done(result)
            return result

        def calibrate(self, options: Any) -> Any:
            self.options = options
            options.output.write_bytes(b"statistics")
            return options.output

        def plan(self, options: Any) -> Any:
            self.options = options
            return self.report

    recorded = Recorded()
    for name in ("convert", "calibrate", "plan"):
        monkeypatch.setattr(real, name, getattr(recorded, name))
    return recorded

"""Devices by name: one place that tries them, for `load` and the commands."""

import pytest
import torch

from nstf.errors import UsageError
from nstf.runtime.devices import usable
from nstf_convert.cli.options import check_device


def test_a_device_that_works_is_given_back() -> None:
    assert usable("cpu", ("cpu", "cuda")) == torch.device("cpu") == usable(torch.device("cpu"))
    assert usable("meta").type == "meta"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nonsense", "Expected one of cpu"), ("meta", "choose cpu or cuda"), ("cuda:999", ".")],
)
def test_the_reason_is_one_line_and_the_command_says_what_to_do(name: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason) as caught:
        usable(name, ("cpu", "cuda"))
    assert "\n" not in str(caught.value) and not str(caught.value).endswith(".")
    with pytest.raises(UsageError, match=f"--device {name}: .*{reason}.*; --device cpu runs everywhere"):
        check_device(name)

"""Quick frozen records are what frozen dataclasses are."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from nstf.kernels.records import MISSING, NEW_DICT, changed, defaults, frozen


@frozen
class Point:
    x: int
    y: int = 2
    names: Any = NEW_DICT

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is negative")

    @property
    def total(self) -> int:
        return self.x + self.y


def test_a_record_is_made_compared_and_shown_like_a_dataclass() -> None:
    one = Point(1)
    assert (one.x, one.y, one.names, one.total) == (1, 2, {}, 3)
    assert one == Point(1, 2, {}) == Point(x=1, y=2, names={}) == Point(1, names={}) != Point(2)
    assert one != (1, 2, {}) and Point(1).names is not one.names
    assert repr(one) == "Point(x=1, y=2, names={})"
    assert len({Point(1, 2, None), Point(1, 2, None), Point(1, 3, None)}) == 2
    with pytest.raises(TypeError):
        hash(one)
    with pytest.raises(ValueError, match="negative"):
        Point(-1)
    match one:
        case Point(x, y):
            assert (x, y) == (1, 2)


def test_it_cannot_be_changed() -> None:
    one: Any = Point(1)
    for change in (lambda: setattr(one, "x", 2), lambda: setattr(one, "new", 2), lambda: delattr(one, "x")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert one == Point(1)


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [((), {}, "lacks the value of 'x'"), ((1, 2, 3, 4), {}, "takes 3 values, 4"), ((1,), {"x": 1}, "'x' is given twice"),
     ((1,), {"z": 1}, "'z' is no field")],
)  # fmt: skip
def test_wrong_arguments_are_type_errors(given: Any, named: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Point(*given, **named)


def test_the_functions_of_dataclasses_take_it() -> None:
    one = Point(1, 5)
    assert dataclasses.is_dataclass(one)
    assert [f.name for f in dataclasses.fields(Point)] == ["x", "y", "names"]
    assert dataclasses.asdict(one) == {"x": 1, "y": 5, "names": {}}
    assert dataclasses.replace(one, x=3) == Point(3, 5) == changed(one, x=3)
    with pytest.raises(TypeError):
        changed(one, z=3)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == copy.copy(one) == one


def test_defaults_of_records_and_dataclasses() -> None:
    @dataclasses.dataclass(frozen=True)
    class Other:
        a: int
        b: str = "b"

    assert dict(defaults(Point)) == {"x": MISSING, "y": 2, "names": NEW_DICT}
    assert dict(defaults(Other)) == {"a": MISSING, "b": "b"}
    assert changed(Other(1), b="c") == Other(1, "c")

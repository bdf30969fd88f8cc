"""Frozen dataclasses that are quick to make: for modules that a process imports before it writes its first token.

Making a class with `dataclasses` takes 0.3 ms and importing it 7 ms (Python 3.11; it imports `inspect`): with the twenty
classes on that way a fifth of the time that a small model takes to its first token (docs/cpu.md).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeVar, dataclass_transform

    T = TypeVar("T")

    @dataclass_transform(frozen_default=True)
    def frozen(cls: type[T]) -> type[T]: ...


class _Missing:
    def __repr__(self) -> str:
        return "no default"


MISSING = _Missing()
# The default of a field that is a new empty dictionary for each instance.
NEW_DICT: Any = object()


def defaults(cls: type) -> Mapping[str, Any]:
    """The fields of a record or a dataclass in their order, each with its default, MISSING where it has none."""
    own: Mapping[str, Any] | None = vars(cls).get("_record_defaults")
    if own is not None:
        return own
    import dataclasses

    return {
        f.name: MISSING if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(cls)
    }


def changed(value: T, **changes: Any) -> T:
    """The same record or dataclass but for these fields. Raises TypeError for one that it lacks."""
    return type(value)(**{**vars(value), **changes})


class _Fields:
    """What the functions of `dataclasses` ask a class for, made when one of them does."""

    def __get__(self, instance: object, cls: type) -> Any:
        import dataclasses

        made = dataclasses.make_dataclass(
            cls.__name__,
            [
                (name, cls.__annotations__[name])
                if default is MISSING
                else (name, cls.__annotations__[name], _field(default))
                for name, default in defaults(cls).items()
            ],
            frozen=True,
        )
        found = vars(made)["__dataclass_fields__"]
        type.__setattr__(cls, "__dataclass_fields__", found)
        return found


def _field(default: Any) -> Any:
    import dataclasses

    if default is NEW_DICT:
        return dataclasses.field(default_factory=dict)
    return dataclasses.field(default=default)


if not TYPE_CHECKING:

    def frozen(cls: type[T]) -> type[T]:
        """What `dataclasses.dataclass(frozen=True)` makes of a class, for `dataclasses`' own functions too. For
        classes without a base class whose fields have plain defaults or NEW_DICT.
        """
        names = tuple(cls.__annotations__)
        own = {name: vars(cls).get(name, MISSING) for name in names}
        cls._record_defaults = own
        cls.__dataclass_fields__ = _Fields()
        cls.__match_args__ = names
        for name, value in _methods(names, own, getattr(cls, "__post_init__", None)).items():
            if name not in vars(cls) or name == "__hash__":
                setattr(cls, name, value)
        return cls


def _methods(
    names: tuple[str, ...], own: Mapping[str, Any], check: Callable[[Any], None] | None
) -> dict[str, Any]:
    """The methods of a record with these fields. check: its `__post_init__`."""
    count = len(names)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) == count and not kwargs:
            self.__dict__.update(zip(names, args, strict=True))
        else:
            _fill(self, names, own, args, kwargs)
        if check is not None:
            check(self)

    def values(self: Any) -> tuple[Any, ...]:
        held = self.__dict__
        return tuple([held[name] for name in names])

    def __eq__(self: Any, other: object) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(values(self))

    def __repr__(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{n}={self.__dict__[n]!r}' for n in names)})"

    def __setattr__(self: Any, name: str, value: object) -> None:
        raise _frozen(f"cannot assign to field {name!r}")

    def __delattr__(self: Any, name: str) -> None:
        raise _frozen(f"cannot delete field {name!r}")

    return {f.__name__: f for f in (__init__, __eq__, __hash__, __repr__, __setattr__, __delattr__)}


def _fill(
    self: Any,
    names: tuple[str, ...],
    own: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """The fields of a new record from arguments and defaults. Raises TypeError."""
    if len(args) > len(names):
        raise TypeError(f"{type(self).__name__} takes {len(names)} values, {len(args)} were given")
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in own or name in given:
            what = "is given twice" if name in own else "is no field"
            raise TypeError(f"{name!r} {what} of {type(self).__name__}")
        given[name] = value
    for name in names:
        if name not in given:
            default = own[name]
            if default is MISSING:
                raise TypeError(f"{type(self).__name__} lacks the value of {name!r}")
            given[name] = {} if default is NEW_DICT else default
    self.__dict__.update((name, given[name]) for name in names)


def _frozen(message: str) -> AttributeError:
    from dataclasses import FrozenInstanceError

    return FrozenInstanceError(message)

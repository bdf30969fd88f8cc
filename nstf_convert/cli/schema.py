"""Command-line options made from the fields of ConvertOptions: a name, a help text and limits are written once, there."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from nstf.errors import UsageError
from nstf_convert.checkpoint.paths import expanded
from nstf_convert.options import ConvertOptions

FIELDS: Mapping[str, Field] = {f.name: f for f in fields(ConvertOptions) if "help" in f.metadata}
# What the command line takes where the field holds something parsed from it.
_TYPES = {
    "datasets": list[str] | None,
    "formats": str | None,
    "target": str | None,
    "tp": str | None,
    "memory": str | None,
    "gpu_memory": str | None,
}


def with_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command gets an option for each named field, and their values as its argument `settings`."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
        parameters = [*own, *(_parameter(FIELDS[name]) for name in names)]

        def run(**given: Any) -> None:
            settings = {name: given.pop(name) for name in names}
            command(**given, settings=settings)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return wrap


# Options of other commands than convert by their fields: those of exports, of gates and of the server.
_OF_OTHERS = {
    name: "--" + name.replace("_", "-")
    for name in (
        "allow_loss", "dtype", "overwrite", "source", "dataset", "tasks", "max_kl", "max_p99_kl", "min_top1",
        "max_ppl_ratio", "min_cosine", "min_accuracy", "min_accuracy_norm", "max_flips", "reproducible", "kv_cache",
        "attention",
    )
}  # fmt: skip
# How the library's errors name an option: by its field, and `attention_plan=False` for what a flag turns off.
_NAMED = re.compile(r"`(\w+)(=False)?`")


def with_flags(text: str) -> str:
    """An error's text in the words of the command line: `kv_budget` in it becomes --kv-budget."""

    def flag(found: re.Match[str]) -> str:
        field = FIELDS.get(found[1])
        if field is None:
            return _OF_OTHERS.get(found[1], found[0])
        named = str(field.metadata["flag"]).split("/")[0] or "--" + found[1].replace("_", "-")
        return named.replace("--", "--no-", 1) if found[2] else named

    return _NAMED.sub(flag, text)


def _parameter(field: Field) -> inspect.Parameter:
    meta = field.metadata
    default = None if field.name == "datasets" else field.default
    if default is MISSING:
        raise ValueError(f"{field.name} has no default and cannot be an option")
    flags = [f for f in str(meta.get("flag", "")).split("/") if f]
    kind: Any = _TYPES.get(field.name, field.type)
    if not flags and kind in (bool, bool | None):
        name = field.name.replace("_", "-")
        flags = [f"--{name}"] if default is False else [f"--{name}/--no-{name}"]
    limits = {n: meta[n] for n in ("min", "max", "metavar") if n in meta}
    shown = typer.Option(
        *flags,
        help=meta["help"],
        rich_help_panel=meta["group"] or None,
        show_default=default not in (None, False),
        **limits,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown]
    )


# How the help names what an option takes, where typer shows Python's type: `<int range>`, `<list[str]>`.
_TYPE = re.compile(r"<(?:list\[)?(int|float|str|path)(?: range)?\]?>", re.IGNORECASE)
# Options that are paths; of arguments there are no empty ones that are taken.
_PATHS = frozenset(
    "api_key_file calibration chat_template dataset datasets junit kernels machine output reference report save_machine "
    "source svg tasks work_dir".split()
)
_WORDS = {"int": "N", "float": "X", "str": "TEXT", "path": "PATH"}


class GroupedCommand(TyperCommand):
    """A command whose `--help` lists the options under the groups they were given, and says what they take in words. Its
    paths may begin with `~`, which a shell leaves alone in `--output=~/model.nstf`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises UsageError for a path that is empty, of a variable that is not set: Path would take the current folder."""
        flags = {flag for parameter in self.params if parameter.name in _PATHS for flag in parameter.opts}
        for one, following in zip(args, [*args[1:], None], strict=False):
            if (one in flags and following == "") or (one.endswith("=") and one[:-1] in flags):
                raise UsageError(f"{one.rstrip('=')}: a path is empty: give the name of a file or a folder")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        ctx.params = {name: _at_home(value) for name, value in ctx.params.items()}
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`MODEL`, `[PROMPT]`: not typer's `{model}`."""
        return [
            piece if piece.startswith("[OPTIONS") else piece.strip("{}").upper()
            for piece in super().collect_usage_pieces(ctx)
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and not isinstance(parameter, _argument()):
                record = (_TYPE.sub(lambda found: _WORDS[found[1].lower()], record[0]), record[1])
                name = getattr(parameter, "rich_help_panel", None)
                groups.setdefault(name if isinstance(name, str) else "Options", []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def _at_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_at_home(one) for one in value]
    return expanded(value) if isinstance(value, Path) else value


def _argument() -> type:
    from typer.core import TyperArgument

    return TyperArgument

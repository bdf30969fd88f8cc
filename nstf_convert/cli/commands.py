"""The typer application of the `nstf` command."""

import importlib
from collections.abc import Iterable
from typing import Annotated

import typer

from nstf import __version__
from nstf_convert.cli import EPILOG, SUMMARIES
from nstf_convert.cli.schema import GroupedCommand


def application(names: Iterable[str]) -> typer.Typer:
    """The command with these sub-commands: only the one that is about to run has to be imported."""
    app = typer.Typer(
        name="nstf",
        help="A checkpoint and a byte budget in, one measured .nstf file out.",
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(common_options)
    for name in names:
        module = importlib.import_module(f"nstf_convert.cli.{name}")
        app.command(
            name, cls=GroupedCommand, short_help=SUMMARIES[name], epilog=EPILOG, no_args_is_help=True
        )(getattr(module, name))
    return app


def show_version(wanted: bool) -> None:
    """Prints the version when asked; an option's callback runs before the missing command is noticed."""
    if wanted:
        typer.echo(f"nstf {__version__}")
        raise typer.Exit()


def common_options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=show_version),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for every stage.")] = False,
) -> None:
    """Takes the options that have already been acted on, so that they are in the help."""

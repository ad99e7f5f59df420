"""The reference of the command line, from click: one page a command."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

import click

from gate import cli

FOLDER = "reference/commands"


def command_pages() -> dict[str, str]:
    """Markdown of every command, by its place in the site; first the table of all of them."""
    context = click.Context(cli.gate, info_name="gate")
    found = {name: cli.gate.get_command(context, name) for name in cli.COMMANDS}
    rows = [f"| [`gate {name}`]({name}.md) | {_text(_short(c))} |" for name, c in found.items()]
    table = "\n".join(["| command | |", "|---|---|", *rows])
    ends = _text(cli.gate.epilog or "")
    whole = f"# Commands\n\n{_text(_paragraphs(cli.gate)[0])}\n\n{table}\n\n{ends}\n"
    pages = {f"{FOLDER}/index.md": whole}
    for name, command in found.items():
        assert command is not None
        sections = _sections(command, f"gate {name}", level=1)
        pages[f"{FOLDER}/{name}.md"] = "\n\n".join(sections) + "\n"
    return pages


def subcommands(command: click.Command) -> dict[str, click.Command]:
    """Those of a group, and of a command that does something by itself, too."""
    if isinstance(command, click.Group):
        return dict(command.commands)
    places = getattr(command, "subcommands", {})
    return {name: _loaded(place) for name, place in places.items()}


def _loaded(place: str) -> click.Command:
    module, _, name = place.partition(":")
    command: click.Command = getattr(importlib.import_module(module), name)
    return command


def _sections(command: click.Command, name: str, *, level: int) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    yield f"{'#' * level} `{name}`"
    first, *rest = _paragraphs(command)
    yield _text(first)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```"
    yield from (_block(paragraph) for paragraph in rest)
    options = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    records = [option.get_help_record(context) for option in options]
    rows = [f"| `{names}` | {_text(text)} |" for names, text in filter(None, records)]
    yield "\n".join(
        ["| option | what it does |", "|---|---|", *(row.replace("\n", " ") for row in rows)]
    )
    for child, inner in subcommands(command).items():
        yield from _sections(inner, f"{name} {child}", level=level + 1)


def _paragraphs(command: click.Command) -> list[str]:
    """Of the help; what follows a form feed is for those who read the code."""
    text = inspect.cleandoc(command.help or "").partition("\f")[0]
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def _block(paragraph: str) -> str:
    """Text; or, where click keeps its lines (`\\b`), code."""
    if not paragraph.startswith("\b"):
        return _text(paragraph)
    head, _, lines = paragraph.removeprefix("\b").strip("\n").partition("\n")
    if head.strip() != "Examples:":
        head, lines = "", f"{head}\n{lines}"
    code = inspect.cleandoc(lines)
    return (f"**{head.strip()}**\n\n" if head else "") + f"```bash\n{code}\n```"


def _short(command: click.Command | None) -> str:
    assert command is not None
    return command.get_short_help_str(limit=200)


def _text(text: str) -> str:
    """Plain text as Markdown in one line: nothing in it means anything else."""
    line = " ".join(text.split())
    return re.sub(r"([\\*_<\[|`])", r"\\\1", line)

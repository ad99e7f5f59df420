"""The command line reference, generated from click: one page per command."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

import click

from gate import cli

FOLDER = "reference/commands"


def command_pages() -> dict[str, str]:
    """Return the Markdown of each command by its path in the site; the first page lists all
    commands."""
    context = click.Context(cli.gate, info_name="gate")
    commands = {name: cli.gate.get_command(context, name) for name in cli.COMMANDS}
    rows = [f"| [`gate {name}`]({name}.md) | {_text(_short(c))} |" for name, c in commands.items()]
    table = "\n".join(["| command | |", "|---|---|", *rows])
    epilog = _text(cli.gate.epilog or "")
    index_page = f"# Commands\n\n{_text(_paragraphs(cli.gate)[0])}\n\n{table}\n\n{epilog}\n"
    pages = {f"{FOLDER}/index.md": index_page}
    for name, command in commands.items():
        assert command is not None
        sections = _sections(command, f"gate {name}", level=1)
        pages[f"{FOLDER}/{name}.md"] = "\n\n".join(sections) + "\n"
    return pages


def subcommands(command: click.Command) -> dict[str, click.Command]:
    """Return the subcommands of a group, or of a command that also works without a subcommand."""
    if isinstance(command, click.Group):
        return dict(command.commands)
    locations = getattr(command, "subcommands", {})
    return {name: _load_command(location) for name, location in locations.items()}


def _load_command(location: str) -> click.Command:
    module, _, name = location.partition(":")
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
    """Return the paragraphs of the help; text after a form feed is only for readers of the code."""
    text = inspect.cleandoc(command.help or "").partition("\f")[0]
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def _block(paragraph: str) -> str:
    """Return a paragraph as text, or as code if click preserves its lines (`\b`)."""
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
    """Return plain text as one line of Markdown with special characters escaped."""
    line = " ".join(text.split())
    return re.sub(r"([\\*_<\[|`])", r"\\\1", line)

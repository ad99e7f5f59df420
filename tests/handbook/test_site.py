"""The site contains every command and every policy field, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from ruamel.yaml import YAML

import gate
from gate import cli
from gate.summary.policy_docs import policy_fields
from handbook import hooks
from handbook.commands import command_pages, subcommands
from handbook.library import library_page
from handbook.policy import policy_page
from tests.exhaustive import for_each

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = command_pages()
POLICY = policy_page()


def commands() -> Iterator[tuple[str, str, click.Command]]:
    """Yield each command and subcommand: its page, its full name, its click object."""
    context = click.Context(cli.gate, info_name="gate")
    for name in cli.gate.list_commands(context):
        pending = [(f"gate {name}", cli.gate.get_command(context, name))]
        for complete, command in pending:
            assert command is not None
            yield f"reference/commands/{name}.md", complete, command
            pending += [(f"{complete} {sub}", each) for sub, each in subcommands(command).items()]


ALL = tuple(commands())


def test_every_command_of_the_help_has_its_page_and_its_row(capsys) -> None:
    assert cli.main(["--help"]) == 0
    listed = re.findall(
        r"^  ([a-z-]+) ", capsys.readouterr().out.split("Commands:")[1], re.MULTILINE
    )
    assert len(listed) == len(cli.COMMANDS)
    for name in listed:
        assert f"# `gate {name}`\n" in PAGES[f"reference/commands/{name}.md"]
        assert f"[`gate {name}`]({name}.md)" in PAGES["reference/commands/index.md"]


@for_each(ALL)
def test_every_option_of_a_command_is_on_its_page(row: tuple[str, str, click.Command]) -> None:
    place, name, command = row
    _, _, section = PAGES[place].partition(f"# `{name}`\n")
    section = re.split(r"^#+ `", section, flags=re.MULTILINE)[0]
    assert "\n```bash\n" in section or not command.help or "Examples" not in command.help
    for param in command.params:
        for option in param.opts if isinstance(param, click.Option) and not param.hidden else ():
            assert re.search(rf"^\| `[^`]*{re.escape(option)}[ ,`/\[]", section, re.MULTILINE), (
                option
            )


def test_there_are_subcommands_of_groups_and_of_commands_that_do_something() -> None:
    names = {name for _, name, _ in ALL}
    assert {
        "gate keys new",
        "gate policy explain",
        "gate export compare",
        "gate history export",
    } <= names


@for_each(policy_fields())
def test_every_field_of_the_policy_is_in_its_reference(field) -> None:
    section = field.path.rpartition(".")[0].removesuffix(".<runtime>").removesuffix("[]")
    heading = f"\n## `{section}`\n" if section else "\n## The policy itself\n"
    below = POLICY.partition(heading)[2].partition("\n## ")[0]
    rows = [row for row in below.splitlines() if row.startswith(f"| <code>{field.name}</code> |")]
    assert len(rows) == 1
    assert len(rows[0].split(" | ")) == 4
    for where, value in field.built_in.items():
        assert f"{value:g} ({where})" in rows[0]
    if field.check is not None and field.check.formula and ".bounds." in field.path:
        assert field.check.formula.replace("|", "&#124;").replace("<", "&lt;") in rows[0]


def test_every_public_name_is_in_the_reference_of_the_library() -> None:
    named = re.findall(r"^::: (\S+)$", library_page(), re.MULTILINE)
    assert sorted(location.rpartition(".")[2] for location in named) == sorted(gate.__all__)


def test_every_page_is_in_the_navigation_once() -> None:
    def pages(nav) -> Iterator[str]:
        for item in nav if isinstance(nav, list) else nav.values():
            yield from [item] if isinstance(item, str) else pages(item)

    config = type("Config", (), {"nav": YAML(typ="safe").load(ROOT / "mkdocs.yml")["nav"]})()
    matches = list(pages(hooks.on_config(config).nav))
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(matches) == sorted(
        {*written, *hooks.generated_paths(), *hooks.PAGES_OUTSIDE_DOCS.values()}
    )


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](metrics.md)", "[a](metrics.md)"),
        ("[a](../benchmarks/README.md#x)", "[a](benchmarks/index.md#x)"),
        ("[`a`](../gate/cli.py)", "`a`"),
        ("[a](https://x.y/z.md)", "[a](https://x.y/z.md)"),
        ("[a](#b)", "[a](#b)"),
        ("![a](report.png)", "![a](report.png)"),
    ],
)
def test_links_lead_to_pages_of_the_site(link: str, expected: str) -> None:
    assert hooks.with_site_links(link, source="docs/ci.md", site_path="ci.md") == expected


def test_a_page_beside_docs_links_into_it() -> None:
    created = hooks.with_site_links(
        "[c](../docs/cuda.md) [w](world/README.md)",
        source="benchmarks/README.md", site_path="benchmarks/index.md",
    )  # fmt: skip
    assert created == "[c](../cuda.md) [w](world.md)"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('<script src="https://cdn.x/a.js"></script>', True),
        ("<link rel=stylesheet href=//fonts.x/css>", True),
        ('<link rel="preconnect" href="https://fonts.x">', True),
        ('<img alt="" src="http://x.y/badge.svg">', True),
        ("<style>@import url(https://x.y/a.css)</style>", True),
        ("<style>a{background:url('//x.y/a.png')}</style>", True),
        ('<script src="assets/a.js"></script><img src="a.png">', False),
        ('<link rel="canonical" href="https://x.y/"><a href="https://x.y">x</a>', False),
    ],
)
def test_what_a_browser_would_fetch_from_elsewhere_is_found(
    tmp_path: Path, text: str, refused: bool
) -> None:
    (tmp_path / "page.html").write_text(text)
    assert bool(hooks.foreign_assets(tmp_path)) is refused


def test_the_comparison_quotes_the_benchmarks() -> None:
    measured = (ROOT / "benchmarks/README.md").read_text().splitlines()
    page = (DOCS / "comparison.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("|") and re.search(r"\d", row)]
    assert len(rows) >= 5
    assert [row for row in rows if row not in measured] == []


@pytest.mark.proof
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    assert (tmp_path / "index.html").is_file()
    for path in (*PAGES, "reference/policy.md", "reference/library.md"):
        assert (tmp_path / path).with_suffix(".html").is_file(), path

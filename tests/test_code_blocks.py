"""Every code block of the pages is checked by what it is written in, or says why it can't be.

A block after `<!-- excerpt: the reason -->` is checked by nobody. Of all others: command lines of
`gate` are parsed by click, so that commands and options exist; Python is compiled, and what it imports
of gate is there; YAML names fields of the policy or sections of params.yaml. Which of them are run
besides, tests/test_readme.py, tests/test_docs.py and the tests of their subjects say.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from ruamel.yaml import YAML

from gate import cli
from gate.preprocess.spec import PreprocessSpec
from gate.story.policy_fields import fields_named, policy_fields
from handbook.commands import subcommands

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")],
    key=lambda path: path.as_posix(),
)
FENCE = re.compile(
    r"^(?:<!-- excerpt: (?P<reason>[^>]+) -->\n+)?^(?P<indent> *)```(?P<language>\w*)[^\n]*\n"
    r"(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
FIELDS = policy_fields()
SHELLS = {"bash", "sh", "console"}
NO_CODE = {"text"}
"""Drawings, and what a command prints."""


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    reason: str | None
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        code = re.sub(rf"^{found['indent']}", "", found["code"], flags=re.MULTILINE)
        yield Block(page, line, found["language"], found["reason"], code)


ALL = [block for page in PAGES for block in blocks(page)]
CHECKED = [block for block in ALL if block.reason is None and block.language not in NO_CODE]


def test_the_blocks_are_found() -> None:
    fences = sum(page.read_text().count("\n```") for page in PAGES) // 2
    assert len(ALL) == fences > 80
    assert sum(block.reason is not None for block in ALL) < len(CHECKED)


@pytest.mark.parametrize("block", CHECKED, ids=str)
def test_a_block_is_what_it_says(block: Block) -> None:
    if block.language in SHELLS:
        assert check_shell(block.code) > 0, "no line of it is checked: mark it as an excerpt"
    elif block.language == "python":
        check_python(block.code)
    elif block.language == "yaml":
        check_yaml(block.code)
    elif block.language == "json":
        json.loads(block.code)
    elif block.language == "toml":
        tomllib.loads(block.code)
    else:
        pytest.fail(f"'{block.language}' is checked by nobody: mark it as an excerpt, or as text")


@pytest.mark.parametrize("block", [b for b in ALL if b.reason is not None], ids=str)
def test_a_mark_says_why(block: Block) -> None:
    assert len(block.reason or "") > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_indented_commands_exist(page: Path) -> None:
    outside = FENCE.sub("", page.read_text(encoding="utf-8"))
    check_shell("\n".join(re.findall(r"^    (gate (?:.*\\\n)*.*)$", outside, re.MULTILINE)))


def check_shell(code: str) -> int:
    """How many command lines in it were looked at."""
    checked = 0
    for line in re.sub(r"\\\n\s*", " ", code).splitlines():
        for part in _simple_commands(line.removeprefix("$ ")):
            words = [word for word in part if not re.fullmatch(r"[A-Z_]+=.*", word)]
            checked += check_words(words)
    return checked


def _simple_commands(line: str) -> Iterator[list[str]]:
    """The commands that pipes and such join, as words."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("|&;"):
            yield words
            words = []
        else:
            words.append(word)


def check_words(words: list[str]) -> bool:
    if not words:
        return False
    if any(set(word) <= set("<>") for word in words):
        words = words[: next(i for i, word in enumerate(words) if set(word) <= set("<>"))]
    program = words[0].rpartition("/")[2]
    if program == "gate":
        parse_gate(words[1:])
    elif program == "make":
        targets = set(
            re.findall(r"^([a-z-]+)(?: [a-z-]+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        )
        assert {word for word in words[1:] if "=" not in word} <= targets
    elif program.startswith("python") and words[1:2] == ["-m"] and words[2].partition(".")[0] in ("gate", "benchmarks", "pipelines"):  # fmt: skip
        if words[2] == "gate":
            parse_gate(words[3:])
        assert importlib.util.find_spec(words[2]) is not None
    else:
        return False
    return True


def parse_gate(words: list[str]) -> None:
    """Raises click's errors for what does not exist or is missing."""
    context = click.Context(cli.gate, info_name="gate")
    command, rest = cli.gate.get_command(context, words[0]) if words else None, words[1:]
    if command is None:
        assert words
        assert set(words) <= {"--help", "--version", "-h"}, words
        return
    while rest and rest[0] in subcommands(command):
        command, rest = subcommands(command)[rest[0]], rest[1:]
    if "--help" in rest:
        return
    context = click.Context(command, info_name=" ".join(words))
    values, left, _ = command.make_parser(context).parse_args(list(rest))
    assert left == [], f"{left} is no argument of {words}"
    for param in command.params:
        value = values.get(param.name or "")
        assert not param.required or param.name in values, f"{param.name} is missing: {words}"
        if isinstance(param.type, click.Choice) and isinstance(value, str):
            param.type.convert(value, param, context)


def check_python(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gate":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


def check_yaml(code: str) -> None:
    shown = YAML(typ="safe").load(code)
    places = {field.place.partition(".")[0] for field in FIELDS}
    sections = YAML(typ="safe").load(ROOT / "params.yaml")
    policy = shown.get("gate", shown)
    is_spec = "resize" in (shown.get("preprocessing") or {})
    if set(policy) <= places and not is_spec:
        for place in _leaves(policy, ()):
            assert fields_named(".".join(place), FIELDS), f"{'.'.join(place)} is no field"
        return
    if all(isinstance(value, dict) and "required" in value for value in shown.values()):
        check_yaml(json.dumps({"runtimes": shown}))
        return
    if is_spec:
        assert set(policy["preprocessing"]) <= set(PreprocessSpec.model_fields)
        return
    assert set(shown) <= set(sections), "neither a policy nor params.yaml: mark it as an excerpt"
    for name, section in shown.items():
        unknown = set(section) - set(sections[name] or {})
        assert not unknown or name in ("export", "prepare"), f"{name}: {unknown}"


def _leaves(node: object, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Places of a policy as far as their names are the policy's."""
    names = ("outputs", "options", "operating_points")
    if isinstance(node, dict) and node and not (place and place[-1] in names):
        for key, value in node.items():
            yield from _leaves(value, (*place, str(key)))
    else:
        yield place


@pytest.mark.parametrize(
    "code",
    [
        "gate chek model.onnx", "gate check model.onnx --reference a:b --inputs x.npy --jsn",
        "gate check model.onnx --inputs x.npy", "gate keys old", "gate check --task words m --reference a:b --inputs c",
        "make nothing", "python -m benchmarks.nothing", "true && gate history --verfy", "X=1 gate lnt m:b",
    ],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_found(code: str) -> None:
    with pytest.raises((AssertionError, click.ClickException)):
        check_shell(code)


@pytest.mark.parametrize(
    ("check", "code"),
    [
        (check_python, "from gate import Nothing"),
        (check_python, "def broken(:"),
        (check_yaml, "gate: {runtimes: {ort-cpu: {bounds: {noise: 1}}}}"),
        (check_yaml, "instruments: {prbes: true}"),
        (check_yaml, "services: {a: 1}"),
        (check_yaml, "train: {epoch: 1}"),
    ],
)
def test_a_field_or_name_that_does_not_exist_is_found(check, code: str) -> None:
    with pytest.raises((AssertionError, SyntaxError)):
        check(code)

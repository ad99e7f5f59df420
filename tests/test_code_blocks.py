"""A test runs every code block of the pages, unless a comment above it says why it is an excerpt.

tests/test_blocks_run.py runs shell blocks. This module loads YAML as the record that it belongs to.
`RUN_BY` names the tests of other blocks. For all blocks, also excerpts: click parses `gate` command
lines, Python is compiled, and names imported from gate must exist.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from ruamel.yaml import YAML

from gate import cli
from gate.errors import GateError
from gate.policy.policy import Policy
from gate.preprocess.spec import PreprocessSpec
from gate.records.export import ExportSettings
from gate.summary.policy_docs import fields_named, policy_fields
from handbook.commands import subcommands
from tests.exhaustive import for_each

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
THIS_TEST = Path(__file__).relative_to(ROOT).as_posix()
SHELLS = {"bash", "sh", "console"}
NOT_CODE = {"text"}
"""Languages of blocks that are not code: drawings, formulas, environment settings, printed
output."""
BY_README = "tests/test_readme.py"
BY_BASH = "tests/test_blocks_run.py"
BY_LINT = "tests/lint/test_pages.py"
RUN_BY = {
    ("README.md", "bash"): BY_README,
    ("README.md", "python"): BY_README,
    ("docs/getting-started.md", "bash"): BY_README,
    ("docs/getting-started.md", "python"): BY_README,
    ("docs/production.md", "bash"): "tests/end_to_end/test_two_hosts.py",
    ("docs/attestation.md", "python"): "tests/test_docs.py",
    ("docs/custom-operators.md", "python"): "tests/export/test_custom.py",
    ("docs/data.md", "python"): BY_BASH,
    ("docs/instruments.md", "python"): "tests/measure/test_new_instrument.py",
    ("docs/recorded.md", "json"): BY_BASH,
    ("docs/runtimes.md", "python"): "tests/runtimes/test_package.py",
    ("docs/runtimes.md", "toml"): "tests/runtimes/test_package.py",
}
"""The test that runs the blocks of a page in a language, if `runner` has no default for it."""
FIRST_WORDS = {BY_README: "gate ", "tests/end_to_end/test_two_hosts.py": "# "}
"""How a shell block begins that these tests run."""


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
    for result in FENCE.finditer(text):
        line = text.count("\n", 0, result.start("language")) + 1
        code = re.sub(rf"^{result['indent']}", "", result["code"], flags=re.MULTILINE)
        yield Block(page, line, result["language"], result["reason"], code)


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
CHECKED = [block for block in ALL_BLOCKS if block.reason is None and block.language not in NOT_CODE]


def runner(block: Block) -> str | None:
    """Return the test that runs a block."""
    page = block.page.relative_to(ROOT).as_posix()
    if (page, block.language) in RUN_BY:
        return RUN_BY[page, block.language]
    if block.language == "python" and block.page.parent.name == "lint":
        return BY_LINT
    return BY_BASH if block.language in SHELLS else THIS_TEST if block.language == "yaml" else None


def test_code_blocks_are_found() -> None:
    fences = sum(page.read_text().count("\n```") for page in PAGES) // 2
    assert len(ALL_BLOCKS) == fences > 80
    assert sum(block.reason is not None for block in ALL_BLOCKS) < len(CHECKED)


@for_each(CHECKED)
def test_each_block_is_run_or_marked(block: Block) -> None:
    test = runner(block)
    assert test is not None, "no test runs it: name one in RUN_BY, or mark it as an excerpt"
    text = (ROOT / test).read_text()
    assert test == THIS_TEST or block.page.name in text or block.page.parent.name in text
    if block.language in SHELLS and test in FIRST_WORDS:
        lines = re.sub(r"\\\n\s*", " ", block.code).splitlines()
        assert (lines[0] if test != BY_README else min(lines)).startswith(FIRST_WORDS[test])


@for_each(CHECKED)
def test_each_block_matches_its_language(block: Block) -> None:
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


@for_each(b for b in ALL_BLOCKS if b.reason is not None)
def test_each_mark_has_a_reason(block: Block) -> None:
    assert len(block.reason or "") > 10
    for test in re.findall(r"tests/[\w/.]+\w", block.reason or ""):
        assert (ROOT / test).exists(), test
    if block.language in SHELLS:
        check_shell(block.code)


@for_each(PAGES)
def test_no_block_is_hidden_by_indentation(page: Path) -> None:
    """Markdown also treats four spaces as code, which these tests would not check."""
    outside = FENCE.sub("\n", page.read_text(encoding="utf-8"))
    assert re.findall(r"\n\n    \S.*", outside) == []


def check_shell(code: str) -> int:
    """Check each command line; return the number of checked lines."""
    checked = 0
    for line in re.sub(r"\\\n\s*", " ", code).splitlines():
        for part in _simple_commands(line.removeprefix("$ ")):
            words = [word for word in part if not re.fullmatch(r"[A-Z_]+=.*", word)]
            checked += check_words(words)
    return checked


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the commands between pipes and separators, as words."""
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
    """Raise click's error if the command or an option does not exist, or an argument is missing."""
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
    values, remaining, _ = command.make_parser(context).parse_args(list(rest))
    assert remaining == [], f"{remaining} is no argument of {words}"
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
    locations = {field.path.partition(".")[0] for field in FIELDS}
    sections = YAML(typ="safe").load(ROOT / "params.yaml")
    policy = shown.get("gate", shown)
    is_spec = "resize" in (shown.get("preprocessing") or {})
    if set(policy) <= locations and not is_spec:
        for location in _leaves(policy, ()):
            assert fields_named(".".join(location), FIELDS), f"{'.'.join(location)} is no field"
        _read_file(Policy.from_file, _merge(Policy.default().to_plain(), policy))
        return
    if all(isinstance(value, dict) and "required" in value for value in shown.values()):
        check_yaml(json.dumps({"runtimes": shown}))
        return
    if is_spec:
        _read_file(PreprocessSpec.from_file, shown)
        return
    assert set(shown) <= set(sections), "neither a policy nor params.yaml: mark it as an excerpt"
    for name, section in shown.items():
        unknown = set(section) - set(sections[name] or {})
        assert not unknown or name == "export", f"{name}: {unknown}"
    if "export" in shown:
        ExportSettings.model_validate(shown["export"])


def _read_file(reader: Callable[[Path], object], content: object) -> None:
    """Write the content to a file and read it as the command does."""
    with tempfile.TemporaryDirectory() as folder:
        YAML(typ="safe").dump(content, Path(folder, "shown.yaml"))
        reader(Path(folder, "shown.yaml"))


def _merge(policy: Any, part: Any) -> Any:
    """Return a policy updated with the part that a page shows."""
    if not isinstance(policy, dict) or not isinstance(part, dict):
        return part
    return policy | {key: _merge(policy.get(key), value) for key, value in part.items()}


def _leaves(node: object, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield paths of a policy down to keys that are chosen by the user."""
    names = ("outputs", "options", "operating_points", "waive")
    if isinstance(node, dict) and node and not (path and path[-1] in names):
        for key, value in node.items():
            yield from _leaves(value, (*path, str(key)))
    else:
        yield path


@pytest.mark.parametrize(
    "code",
    [
        "gate chek model.onnx", "gate check model.onnx --reference a:b --inputs x.npy --jsn",
        "gate check model.onnx --inputs x.npy", "gate keys old", "gate check --task words m --reference a:b --inputs c",
        "make nothing", "python -m benchmarks.nothing", "true && gate history --verfy", "X=1 gate lnt m:b",
    ],
)  # fmt: skip
def test_unknown_command_is_detected(code: str) -> None:
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
        (check_yaml, "gate: {review: perhaps}"),
        (check_yaml, "preprocessing: {resize: {size: [0, 3]}}"),
    ],
)
def test_unknown_field_or_name_is_detected(check, code: str) -> None:
    with pytest.raises((AssertionError, SyntaxError, GateError)):
        check(code)

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from gate import GateError
from pipelines.override import override, replace_value
from pipelines.params import ModelParams, check_all
from tests.exhaustive import exhaustive
from tests.pipelines.conftest import REPOSITORY


def test_repository_settings_are_valid() -> None:
    check_all(REPOSITORY / "params.yaml")


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("size: [16, 16]", "size: sixteen", "prepare.preprocessing.resize.size"),
        ("size: [16, 16]", "shortest_side: 16", "prepare"),
        ("source: digits", "source: internet", "prepare.source"),
        ("std: [0.5, 0.5, 0.5]", "std: [0.5, 0.0, 0.5]", "prepare.preprocessing.std.1"),
        ("mean: [0.5, 0.5, 0.5]", "mean: [0.5, .nan, 0.5]", "prepare.preprocessing.mean"),
        ("momentum: 0.9", "momentum: 0.9\n  nesterov: true", "train.nesterov"),
        ("opset: 13", "opset: '13'", "export.opset"),
        ("max_abs_diff: 1.0e-4", "max_abs_diff: .nan", "max_abs_diff"),
        ("model_name: tiny", "model_name: ''", "registry.model_name"),
        ("factory: tests.pipelines.tiny:network", "factory: null", "model"),
        ("weights: null", "weights: IMAGENET1K_V1", "model"),
    ],
)
def test_invalid_field_is_named_with_its_line(
    project: Path, old: str, new: str, place: str
) -> None:
    path = project / "params.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(GateError) as caught:
        check_all(path)
    message = str(caught.value)
    assert place in message
    lines = path.read_text().splitlines()
    number = int(message.split(":")[1])
    words = (*(part.partition(":")[0].strip() for part in new.split("\n")), place)
    assert any(word in lines[number - 1] for word in words), (number, message)


def test_override_keeps_comments(project: Path) -> None:
    before = (project / "params.yaml").read_text()
    override(["train.epochs=3", "model.factory="])  # an empty value changes nothing
    after = (project / "params.yaml").read_text()
    assert "epochs: 3  " in after
    assert ModelParams.load().factory == "tests.pipelines.tiny:network"
    assert [line.partition("#")[2] for line in after.splitlines()] == [
        line.partition("#")[2] for line in before.splitlines()
    ]


@pytest.mark.parametrize(
    "setting", ["train.nothing=1", "nothing=1", "train.epochs=-1", "train.epochs=[", "a.b.c=1", "x"]
)
def test_refused_override_changes_nothing(project: Path, setting: str) -> None:
    before = (project / "params.yaml").read_bytes()
    with pytest.raises(GateError):
        override([setting])
    assert (project / "params.yaml").read_bytes() == before
    assert [path.name for path in project.iterdir() if path.suffix == ".tmp"] == []


PARAMS = (REPOSITORY / "params.yaml").read_bytes().decode()


def leaves(node: Any, *above: str) -> Iterator[str]:
    """Yield the dotted names of all scalars, without aliases."""
    for name, value in node.items():
        if isinstance(value, dict):
            if name != "bounds" or above[-1] in ("ort-cpu", "torch-cuda"):
                yield from leaves(value, *above, name)
        elif not isinstance(value, list):
            yield ".".join((*above, name))


DOCUMENT = YAML(typ="safe", pure=True).load(PARAMS)
VALUES = st.one_of(
    st.integers(-9, 999), st.booleans(), st.none(), st.floats(-1e6, 1e6),
    st.text("ab: #'\"{}[],&*!|>%@`-?\\~.é", min_size=1, max_size=6).filter(str.strip),
)  # fmt: skip


@exhaustive
@pytest.mark.proof
@settings(max_examples=25)
@given(st.sampled_from(sorted(leaves(DOCUMENT))), VALUES, st.sampled_from(["\n", "\r\n"]))
def test_override_changes_one_scalar_only(key: str, value: Any, newline: str) -> None:
    text = PARAMS.replace("\n", newline)
    changed = replace_value(text, key, json.dumps(value, ensure_ascii=False))
    document = YAML(typ="safe", pure=True).load(text)
    *sections, leaf = key.split(".")
    node = reduce(getitem, sections, document)
    old, node[leaf] = node[leaf], value
    assert YAML(typ="safe", pure=True).load(changed) == document
    lines = list(zip(text.split(newline), changed.split(newline), strict=True))
    differ = [(item, second) for item, second in lines if item != second]
    assert len(differ) == (repr(old) != repr(value))
    for item, second in differ:
        name, _, rest = item.partition(": ")
        written = rest.partition(" #")[0].rstrip()
        assert second.startswith(f"{name}: ")
        assert second.endswith(rest.removeprefix(written))


@pytest.mark.parametrize(
    ("text", "key", "value", "after"),
    [
        ("a: 'x'  # why\n", "a", "y", "a: 'y'  # why\n"),
        ('a: "x"\n', "a", "it's", 'a: "it\'s"\n'),
        ("a: 'x'\n", "a", "3", "a: 3\n"),
        ("a:   # why\n", "a", "3", "a: 3   # why\n"),
        ("a: &n 1.0e-4\n", "a", "2", "a: &n 2\n"),
        ("{a: 1, b: 2}", "a", "x, c", '{a: "x, c", b: 2}'),
        ("a: [64,  64]   # size\n", "a", "[32, 32]", "a: [32, 32]   # size\n"),
        ("a: x\n", "a", "'b: #'", "a: 'b: #'\n"),
        ("a: !!str 5\n", "a", "six", "a: !!str six\n"),
        ("a: 1\r\nb: é😀 # x\r\nc: 2\r\n", "c", "3", "a: 1\r\nb: é😀 # x\r\nc: 3\r\n"),
        ("a: 1  \n", "a", "1", "a: 1  \n"),
    ],
)
def test_value_is_replaced_in_place(text: str, key: str, value: str, after: str) -> None:
    assert replace_value(text, key, value) == after


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("a: &n 1\nb: *n\n", "a", "without changing more than this setting"),
        ("a: &n 1\nb: *n\n", "b", ":2: 'b' of 'b' is an alias"),
        ("a: &n {c: 1}\nb: *n\n", "b.c", "'b' of 'b.c' is an alias"),
        ("a:\n  - 1\n", "a", "on several lines"),
        ("a: |\n  x\n", "a", "on several lines"),
        ("a: {b: 1}\n", "a.c", "no setting 'a.c'"),
        ("a: 1\n", "a.b", "no setting 'a.b'"),
    ],
)
def test_ambiguous_override_is_refused(text: str, key: str, says: str) -> None:
    with pytest.raises(GateError, match=re.escape(says)):
        replace_value(text, key, "7")

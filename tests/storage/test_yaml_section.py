from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from gate import Policy
from gate.errors import PolicyError
from gate.storage.yaml_section import insert_entry
from tests.storage.test_untrusted import YAML_BOMB

GOOD = """\
gate:
  min_samples: 300
  runtimes:
    ort-cpu:
      required: always
      bounds:
        max_abs_diff: 1e-4
        top1_agreement: 1.0
"""


def load(tmp_path, text, section="gate"):
    path = tmp_path / "params.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Policy.load(path, section=section)


def test_valid_file_loads(tmp_path):
    policy = load(tmp_path, GOOD)
    assert policy.min_samples == 300
    assert policy.runtimes["ort-cpu"].bounds.max_abs_diff == 1e-4
    complete = "\n".join(line[2:] for line in GOOD.splitlines()[1:])
    assert load(tmp_path, complete, section=None) == policy


@pytest.mark.parametrize(
    ("line", "spoiled", "message"),
    [
        ("max_abs_diff: 1e-4", "max_abs_diff: -1e-4", r":7: gate\.runtimes\.ort-cpu\.bounds\.max_abs_diff: .*greater than or equal to 0.*-0\.0001"),
        ("max_abs_diff: 1e-4", "max_abs_diff: .nan", r":7: .*max_abs_diff: Input should be"),
        ("max_abs_diff: 1e-4", "max_abs_diff: .inf", r":7: .*max_abs_diff: Input should be a finite"),
        ("max_abs_diff: 1e-4", "max_abs_diff: '1e-4'", r":7: .*max_abs_diff: .*valid number"),
        ("max_abs_diff: 1e-4", "max_abs_diff: true", r":7: .*max_abs_diff: .*valid number"),
        ("max_abs_diff: 1e-4", "max_abs_dif: 1e-4", r":7: .*max_abs_dif: unknown setting"),
        ("top1_agreement: 1.0", "top1_agreement: 100", r":8: .*less than or equal to 1"),
        ("required: always", "required: maybe", r":5: .*'always', 'when_present' or 'never'"),
        ("required: always", "required: never", r":3: gate\.runtimes|every runtime is 'never'"),
        ("required: always", "required: when_present", r"no runtime is required 'always'"),
        ("ort-cpu:", "ort_gpu:", r":4: .*ort_gpu: use lowercase letters"),
        ("min_samples: 300", "min_samples: 300\n  min_samples: 2", "duplicate key"),
        ("min_samples: 300", "min_samples: [", "not valid YAML"),
        ("min_samples: 300", "confidence: 1.0", ":2: gate.confidence: .*less than 1"),
    ],
)  # fmt: skip
def test_invalid_field_is_named_with_its_line(tmp_path, line, spoiled, message):
    assert line in GOOD
    with pytest.raises(PolicyError, match=message):
        load(tmp_path, GOOD.replace(line, spoiled))


@pytest.mark.parametrize(
    ("name", "mistyped", "place"),
    [
        ("max_abs_diff", "max_abs_dif", r"gate\.runtimes\.ort-cpu\.bounds\.max_abs_dif"),
        ("required", "require", r"gate\.runtimes\.ort-cpu\.require"),
    ],
)
def test_mistyped_nested_setting_suggests_the_nearest(tmp_path, name, mistyped, place):
    with pytest.raises(PolicyError, match=rf"{place}: .* Did you mean {name}\?"):
        load(tmp_path, GOOD.replace(f"{name}:", f"{mistyped}:"))


@pytest.mark.parametrize("name", ["parts", "chain"])
def test_release_file_setting_gets_a_hint(tmp_path, name):
    with pytest.raises(PolicyError, match=rf"gate\.{name}: .* in a release file .* 'release:'"):
        load(tmp_path, GOOD + f"  {name}: {{}}\n")


def test_each_invalid_field_has_a_line(tmp_path):
    text = GOOD.replace("1e-4", "-1").replace("300", "0").replace("1.0", "2.0")
    with pytest.raises(PolicyError) as caught:
        load(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.further
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty or a list"),
        ("- 1", "empty or a list"),
        ("other: 1", "'gate:' is missing or empty"),
        ("gate:", "'gate:' is missing or empty"),
        ("gate: {}", "'gate:' is missing or empty"),
        ("gate: {runtimes: {}}", "runtimes"),
        ("gate: {runtimes: {ort-cpu: {required: always}}}", "no bound is set"),
        # This module's name is fast, but a wrong file.
        (
            "gate: {runtimes: {ort-cpu: {required: always, bounds: {latency_ratio: 2.0}}}}",
            "no bound is set",
        ),
        (
            "gate: {runtimes: {ort-cpu: {required: always, bounds: {memory_mb: 0}}}}",
            "greater than 0",
        ),
        (
            "gate: {runtimes: {ort-cpu: {required: always, bounds: {latency_ratio: .nan}}}}",
            "finite",
        ),
        ("gate: {runtimes: {ort-cpu: {required: always, bounds: {memory_mb: .inf}}}}", "finite"),
        ("gate: 3", "gate"),
        ("gate: *nowhere", "not valid YAML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"gate: 1\n#" + b" " * (1 << 20), "Name a settings file"),
        ("gate: " + "[" * 500 + "]" * 500, "nested too deeply"),
        (YAML_BOMB.replace(b"i: &i", b"gate: &i"), "aliases expand to more than"),
    ],
)
def test_empty_or_invalid_policy_is_refused(tmp_path, text, message):
    with pytest.raises(PolicyError, match=message):
        load(tmp_path, text)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(PolicyError, match=r"cannot read .*nothing\.yaml"):
        Policy.load(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("beside", ["", "      required: always\n"])
def test_invalid_merged_field_has_a_line(tmp_path, beside):
    file = tmp_path / "gate.yaml"
    wrong = "    a: &a\n      bounds: {noise_rati: 1}\n    ort-cpu:\n      <<: *a\n"
    file.write_text(f"gate:\n  runtimes:\n{wrong}{beside}")
    with pytest.raises(PolicyError, match=r"gate\.yaml:\d+: gate\.runtimes\.ort-cpu"):
        Policy.from_file(file)


LINES = ["gate:", "  cmd: run"]
FILE = Path("dvc.yaml")


def add_entry(text: str) -> str | None:
    return insert_entry(text, ("stages", "gate"), LINES, path=FILE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "stages:\n  gate:\n    cmd: run\n"),
        ("a: 1", "a: 1\n\nstages:\n  gate:\n    cmd: run\n"),
        (
            "stages:  # all\n  # the first\n  one: {cmd: a}   # kept\n",
            "stages:  # all\n  gate:\n    cmd: run\n  # the first\n  one: {cmd: a}   # kept\n",
        ),
        (
            "stages:\n    one:\n        cmd: a\nplots: []\n",
            "stages:\n    gate:\n      cmd: run\n    one:\n        cmd: a\nplots: []\n",
        ),
        ("stages:\r\n  one: {}\r\n", "stages:\r\n  gate:\r\n    cmd: run\r\n  one: {}\r\n"),
    ],
)
def test_entry_is_added_and_the_rest_is_kept(text: str, expected: str) -> None:
    result = add_entry(text)
    assert result == expected
    assert YAML(typ="safe").load(result)["stages"]["gate"] == {"cmd": "run"}
    assert add_entry(expected) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stages: {one: {}}\n", "Add this by hand:\nstages:\n  gate:"),
        ("stages:\n", "Add this by hand"),
        ("stages: []\n", "Add this by hand"),
        ("- a\n", "expected a mapping"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_unextendable_file_shows_the_lines_to_add(text: str, says: str) -> None:
    with pytest.raises(PolicyError) as error:
        add_entry(text)
    assert says in str(error.value)
    assert "dvc.yaml" in str(error.value)


def test_existing_entry_is_kept() -> None:
    assert add_entry("stages:\n  gate: {cmd: mine}\n") is None

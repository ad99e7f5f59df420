from __future__ import annotations

from pathlib import Path

import pytest

from gate.policy.overrides import EffectiveValue, effective_values, with_overrides
from gate.policy.policy import Policy

TEXT = """\
other: 1
gate:
  task: tensors
  instruments:
    probes: false
  runtimes:
    ort.v2:
      kind: ort
      required: always
      options: {providers: [CPUExecutionProvider]}
      bounds: &cpu
        noise_ratio: 1.5
    ort-cpu:
      required: always
      bounds:
        <<: *cpu
        noise_peak: 6.0
"""


def read_effective_values(
    tmp_path: Path, text: str = TEXT, **settings: str
) -> dict[str, EffectiveValue]:
    file = tmp_path / "gate.yaml"
    file.write_text(text)
    policy = with_overrides(
        Policy.from_file(file), {k.replace("__", "."): v for k, v in settings.items()}
    )
    result = effective_values(policy, file=file, options={})
    return {each.dotted: each for each in result}


@pytest.mark.parametrize(
    ("place", "value", "origin"),
    [
        ("task", "tensors", "gate.yaml:3"),
        ("precision", "exact", "default"),
        ("instruments.probes", False, "gate.yaml:5"),
        ("instruments.graph", True, "default"),
        ("runtimes.ort.v2.bounds.noise_ratio", 1.5, "gate.yaml:12"),
        ("runtimes.ort.v2.options", {"providers": ["CPUExecutionProvider"]}, "gate.yaml:10"),
        ("runtimes.ort-cpu.bounds.noise_peak", 6.0, "gate.yaml:17"),
        ("runtimes.ort-cpu.bounds.max_abs_diff", None, "default"),
    ],
)
def test_value_has_origin_file_and_line(
    tmp_path: Path, place: str, value: object, origin: str
) -> None:
    result = read_effective_values(tmp_path)[place]
    assert (result.value, result.origin.removeprefix(f"{tmp_path}/")) == (value, origin)


def test_merged_bound_has_origin_in_the_file(tmp_path: Path) -> None:
    result = read_effective_values(tmp_path)["runtimes.ort-cpu.bounds.noise_ratio"]
    assert result.value == 1.5
    assert result.origin.startswith(f"{tmp_path}/gate.yaml:")


def test_override_has_origin_set(tmp_path: Path) -> None:
    result = read_effective_values(tmp_path, task="auto", instruments__noise_samples="7")
    tried = [location for location, each in result.items() if each.origin == "--set"]
    assert tried == ["task", "instruments.noise_samples"]
    assert result["task"].value == "auto"
    assert result["instruments.probes"].origin.endswith(":5")


def test_file_without_section_is_read_as_policy(tmp_path: Path) -> None:
    text = "\n".join(line[2:] for line in TEXT.splitlines()[2:])
    assert read_effective_values(tmp_path, text)["task"].origin.endswith("gate.yaml:1")


def test_built_in_policy_values_have_origin_default_or_option() -> None:
    result = effective_values(Policy.default(), file=None, options={"task": "--task"})
    assert {each.origin for each in result} == {"default", "--task"}
    assert [each.dotted for each in result if each.origin == "--task"] == ["task"]

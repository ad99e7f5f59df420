"""The measurement plan does not contain bounds: a changed bound needs a new decision only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from gate import Policy
from gate.policy.sections import Bounds
from gate.records.runtime import CPU_PROVIDER
from pipelines import paths, plan
from pipelines.measured import measured_part
from tests.pipelines.conftest import REPOSITORY
from tests.pipelines.test_quantized_twin import POLICY, set_twin_policy
from tests.policy.test_runtimes import policy


@pytest.fixture(autouse=True)
def _params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(REPOSITORY / paths.PARAMS, paths.PARAMS)


def write_plan() -> tuple[str, str]:
    """Run the stage; return the plan of the file and of its twin."""
    assert plan.main() == 0
    return paths.PLAN.read_text(), paths.TWIN_PLAN.read_text()


def test_plan_records_a_missing_twin() -> None:
    exact, twin = write_plan()
    assert "ort-cpu" in json.loads(exact)["runtimes"]
    assert json.loads(twin) is None


def test_changed_twin_bound_keeps_both_plans() -> None:
    set_twin_policy(agreement=0.9)
    before = write_plan()
    set_twin_policy(agreement=0.8)
    assert write_plan() == before
    assert set(json.loads(before[1])["runtimes"]) == set(POLICY["runtimes"])


def test_changed_twin_instrument_changes_only_its_plan() -> None:
    set_twin_policy()
    exact, twin = write_plan()
    yaml = YAML()
    settings = yaml.load(paths.PARAMS)
    settings["gate"]["twin"]["instruments"]["stability_samples"] = 2
    yaml.dump(settings, paths.PARAMS)
    assert write_plan()[0] == exact
    assert write_plan()[1] != twin


CHANGED_POLICIES = {
    "another bound": ({"bounds": Bounds(max_abs_diff=0.5)}, False),
    "bounds on its cost": (
        {"bounds": Bounds(max_abs_diff=0.1, latency_ratio=1.5, memory_mb=100.0)},
        False,
    ),
    "another demand": ({"required": "when_present"}, False),
    "never": ({"required": "never"}, True),
    "another option": ({"options": {"providers": [CPU_PROVIDER], "threads": 2}}, True),
    "another kind": ({"kind": None}, True),
}


@pytest.mark.parametrize(("change", "anew"), CHANGED_POLICIES.values(), ids=CHANGED_POLICIES)
def test_plan_contains_no_bounds(change, anew):
    before = {"kind": "ort", "options": {"providers": [CPU_PROVIDER]}}
    parts = [measured_part(policy(**expected)) for expected in (before, before | change)]
    assert (parts[0] != parts[1]) is anew


def test_order_of_runtimes_does_not_matter():
    policy_with_two = Policy.default()
    turned = policy_with_two.model_copy(
        update={"runtimes": dict(reversed(policy_with_two.runtimes.items()))}
    )
    assert measured_part(policy_with_two) == measured_part(turned)


@pytest.mark.parametrize(
    ("change", "anew"),
    [
        ({"confidence": 0.9}, False),
        ({"review": "required"}, False),
        ({"instruments": {"probe_noise_ratio": 64.0}}, False),
        ({"instruments": {"noise_samples": 16}}, True),
        ({"determinism": {"seed": 3}}, True),
        ({"cuda_provider": {"cudnn_conv_algo_search": "DEFAULT"}}, True),
        ({"nonfinite": "same_places"}, True),
        ({"logits": ["y"]}, True),
    ],
)
def test_other_policy_fields_are_not_in_the_plan(change, anew):
    plain = Policy.default().to_plain()
    second = Policy.from_json(json.dumps(plain | change))
    assert (measured_part(second) != measured_part(Policy.default())) is anew

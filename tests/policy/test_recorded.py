"""Settings that a policy may have for a recording, and settings that it can't have."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gate.policy.policy import Policy
from gate.policy.runtime_options import UNREPEATED, is_recorded, may_lack_probes
from gate.policy.sections import Bounds, RuntimePolicy
from tests import builders


def policy(name="phone", **fields) -> Policy:
    expected = {"required": "always", "kind": "recorded"} | fields
    expected.setdefault("bounds", Bounds(noise_ratio=32.0, top1_agreement=1.0))
    plain = builders.policy()
    runtimes = {**plain.runtimes, name: RuntimePolicy(**expected)}
    return Policy(**{**dict(plain), "runtimes": runtimes})


@pytest.mark.parametrize("bound", UNREPEATED)
def test_stability_bounds_of_a_recording_are_refused(bound):
    bounds = Bounds(**{"noise_ratio": 32.0, "top1_agreement": 1.0, bound: 1.0})
    with pytest.raises(ValidationError, match=f"phone.*{bound} can't be measured on a recording"):
        policy(bounds=bounds)
    policy(bounds=bounds, required="never")


@pytest.mark.parametrize("options", [{"probes": "never"}, {"folder": "recordings/phone"}])
def test_unknown_options_of_a_recording_are_refused(options):
    with pytest.raises(ValidationError, match="phone"):
        policy(options=options)


def test_probes_of_a_recording_are_optional_only_by_option():
    assert is_recorded(policy(), "phone")
    assert not may_lack_probes(policy(), "phone")
    lenient = policy(options={"probes": "when_recorded"})
    assert may_lack_probes(lenient, "phone")
    assert not is_recorded(lenient, "ort-cpu")
    assert not may_lack_probes(lenient, "ort-cpu")
    assert is_recorded(policy("recorded", kind=None), "recorded")


def test_probe_option_has_no_effect_on_executing_runtime():
    second = policy("acme", kind=None, options={"probes": "when_recorded"})
    assert not may_lack_probes(second, "acme")

"""The search for an optimiser runs in another process: what breaks there is a reason, and the
process of the verdict opens no session of those that it tries."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gate.errors import DigestMismatch
from gate.localize import ort_optimizers
from gate.localize.layer_deviations import DeviationLimits
from gate.localize.ort_optimizers import (
    OptimizerTrials,
    ReferenceOutput,
    TrialSettings,
    blame_apart,
    tried,
)
from gate.onnx_file.tested_file import TestedFile
from gate.policy.runtime_options import plain_setup
from gate.records.localization import OptimizerFault
from gate.sandbox.process import run_in_sandbox
from tests.localize.optimizers.faults import FAULTS

FAULT = FAULTS["a transposed matrix by a vector"]


@pytest.fixture(scope="module")
def candidate(tmp_path_factory) -> TestedFile:
    return FAULT.file(tmp_path_factory.mktemp("fault") / "m.onnx")


@pytest.fixture(scope="module")
def right() -> list[ReferenceOutput]:
    """What the model computes in float32 and in float64."""
    model = FAULT.model().eval()
    wanted = model(torch.from_numpy(FAULT.inputs)).detach().numpy()
    exact = model.double()(torch.from_numpy(FAULT.inputs).double()).detach().numpy()
    truths = {"logits": exact[:2].astype(np.float64).reshape(-1)}
    return [
        ReferenceOutput({"input": FAULT.inputs[:2]}, {"logits": wanted[:2]}, True, truths),
        ReferenceOutput({"input": FAULT.inputs}, {"logits": wanted}, False, None),
    ]


def inquiry(candidate: TestedFile) -> TrialSettings:
    setup = plain_setup("ort-cpu-optimized")
    limits = DeviationLimits("ort-cpu-optimized", setup, float64=True)
    return TrialSettings(candidate, limits, bound=16.0, threads=1, deterministic=False)


def test_it_is_found_there(candidate, right, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a session was opened in the process of the verdict")

    monkeypatch.setattr(OptimizerTrials, "outcome", never)
    found = blame_apart(inquiry(candidate), right)
    assert (found.names, found.reason_code) == (FAULT.names, None)


def test_what_is_asked_and_the_arrays_arrive_as_they_are(candidate, right, monkeypatch):
    """Without a process: the child's side, called here."""
    arrived = {}

    def judge(answers, limits, *, bound):
        arrived.update(right=answers, limits=limits, bound=bound)
        raise DigestMismatch("far enough")

    monkeypatch.setattr(ort_optimizers, "OutputJudge", judge)
    monkeypatch.setattr(
        ort_optimizers, "run_in_sandbox", lambda _, arguments, **__: tried(**arguments)
    )
    given = inquiry(candidate)
    found = blame_apart(dataclasses.replace(given, bound=0.25), right)
    assert found == OptimizerFault(reason_code="stopped", reason_params={"failure": "far enough"})
    assert (arrived["limits"], arrived["bound"]) == (given.limits, 0.25)
    for before, after in zip(right, arrived["right"], strict=True):
        assert before.first == after.first
        for name in ("feed", "outputs", "truths"):
            np.testing.assert_equal(getattr(after, name), getattr(before, name))


@pytest.mark.parametrize(
    ("does", "limit_s", "reason"),
    [
        (("die", {"number": 6}), 40.0, "the process that did it died of SIGABRT"),
        (
            ("for_ever", {}),
            0.5,
            "switching off optimisers took more than the 0.5 s that are allowed",
        ),
        (("stumble", {}), 40.0, "KeyError"),
        (("echo", {"names": 5}), 40.0, "names"),
    ],
)
def test_what_breaks_there_is_a_reason_and_no_error(
    candidate, right, monkeypatch, does, limit_s, reason
):
    def other(_, arguments, **options):
        function, given = does
        return run_in_sandbox(f"tests.sandbox.behavior:{function}", given, **options)

    monkeypatch.setattr(ort_optimizers, "APART_LIMIT_S", limit_s)
    monkeypatch.setattr(ort_optimizers, "run_in_sandbox", other)
    found = blame_apart(inquiry(candidate), right)
    assert found.names == ()
    assert reason in found.reason_params["failure"]
    assert "Nothing was decided" not in found.reason_params["failure"]


def test_what_no_file_can_hold_is_a_reason(candidate, right):
    odd = dataclasses.replace(right[0], feed={"input": np.array([{}], dtype=object)})
    found = blame_apart(inquiry(candidate), [odd])
    assert (found.names, found.below) == ((), None)
    assert "ValueError" in found.reason_params["failure"]

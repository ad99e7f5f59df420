"""A constant beside what varies: a few units are rounding, a millionth of it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gate.decision.check_result import Verdict
from gate.policy.policy import Policy
from tests.inferred_roles.nets import Net, exported, judged


def warm(factor: float):
    """Answers, and a temperature that the model computes."""

    def head(net: Net, x: torch.Tensor) -> object:
        return x, torch.full((1,), 2.6592 * factor).exp()

    return head


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.0 + 1e-6, False), (1.1, False)])
def test_a_constant_is_held_to_its_own_rounding(factor: float, passes: bool, tmp_path: Path):
    file = exported(Net(warm(factor)), tmp_path / "model.onnx")
    policy = Policy.default()
    quick = policy.instruments.model_copy(update={"probes": False, "search_inputs": 0})
    policy = policy.model_copy(update={"instruments": quick})
    decision = judged(Net(warm(1.0)), file, 48, policy).decision
    assert (decision.verdict is Verdict.PASS) is passes, decision.problems
    names = {check.name for check in decision.problems}
    assert names <= {"noise_peak", "noise_ratio", "noise_diff"}

"""gate promote submits or promotes, as the option or the policy requires."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.commands.promote import refuse_release, submit_or_promote, uses_submission
from gate.commands.result import ExitCode
from gate.ledger.ledger import Ledger
from gate.registry.interface import CANDIDATE, CHAMPION
from gate.registry.registered_model import RegisteredModel
from gate.registry.verify_release import verify_release
from gate.signing.keys import SigningKey
from tests import builders
from tests.registry.releases import NAME, onnx_file, release
from tests.registry.signed import Signing, trust_in
from tests.registry.simulator import Simulator

DIRECT, BY_SERVICE = builders.policy(), builders.policy(promotion="by_service")


@pytest.mark.parametrize(
    ("policy", "given", "handed_in"),
    [
        (DIRECT, None, False),
        (DIRECT, True, True),
        (BY_SERVICE, None, True),
        (BY_SERVICE, False, False),
    ],
)
def test_release_is_submitted_or_promoted_by_option_or_policy(
    tmp_path: Path, policy, given, handed_in: bool
) -> None:
    registry, ledger = Simulator(), Ledger(tmp_path / "state.db")
    key = SigningKey.make(tmp_path / "ci.pem")
    of = Signing(key).signed(release(onnx_file(tmp_path / "model.onnx"), policy=policy), policy)
    assert uses_submission(policy, given) is handed_in
    model, trust = RegisteredModel(registry, ledger, NAME), trust_in(key)
    verified = verify_release(of, policy=policy, trust=trust, registries=model.identities())
    result = submit_or_promote(model, verified, submits=handed_in)
    assert result.outcome == ("handed_in" if handed_in else "promoted")
    assert registry.aliases == {CANDIDATE: "1"} | ({} if handed_in else {CHAMPION: "1"})
    assert [line.action for line in ledger.entries()] == ([] if handed_in else ["promoted"])


@pytest.mark.parametrize("submits", [True, False])
def test_refusal_is_recorded_only_when_promoting(tmp_path: Path, submits: bool) -> None:
    model = RegisteredModel(Simulator(), Ledger(tmp_path / "state.db"), NAME)
    result = refuse_release(model, release(onnx_file(tmp_path / "m.onnx")), "why", submits=submits)
    assert (result.outcome, result.reason) == ("refused", "why")
    assert len(model.ledger.entries()) == (0 if submits else 1)


@pytest.mark.parametrize(("verdict", "code"), [("PASS", 0), ("FAIL", 1), ("ERROR", 2)])
def test_exit_code_of_a_verdict(verdict: str, code: int) -> None:
    assert int(ExitCode.from_verdict(verdict)) == code


@pytest.mark.parametrize(
    ("outcome", "verdict", "code"),
    [
        ("promoted", "PASS", 0),
        ("passed", "PASS", 0),
        ("unchanged", "PASS", 0),
        ("dry_run", "PASS", 0),
        ("rolled_back", None, 0),
        ("refused", "FAIL", 1),
        ("refused", "ERROR", 2),
        # This file was rolled back or rejected by a reviewer before.
        ("refused", "PASS", 1),
        ("refused", None, 1),
    ],
)
def test_exit_code_of_a_promotion(outcome: str, verdict: str | None, code: int) -> None:
    assert int(ExitCode.from_promotion(outcome, verdict)) == code

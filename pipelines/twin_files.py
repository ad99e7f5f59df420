"""The folder models/twin/, which `twin` writes and `promote` reads."""

from __future__ import annotations

from pathlib import Path

from gate.decision.decide import decide
from gate.golden.folder import GOLDEN_JSON
from gate.golden.tolerance import refit
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.records.layout import EVIDENCE, EVIDENCE_STATEMENT, GOLDEN, RECORDS
from gate.registry.release import EvaluatedFile, GoldenFolder
from gate.registry.version_files import twin_file
from pipelines import paths

NAME = "model.onnx"
"""Name of the twin's file or release file."""
STATEMENT = paths.TWIN / RECORDS / EVIDENCE_STATEMENT
VECTORS = paths.TWIN / GOLDEN


def decide_on_twin(policy: Policy, folder: Path, *, decided_at: str) -> EvaluatedFile | None:
    """Decide on the twin by the current policy; copy its golden vectors to `folder`.

    Returns None if the policy has no twin. Raises EvidenceError if the stage `twin` wrote none.
    """
    if policy.twin is None:
        return None
    evidence = Evidence.load(paths.TWIN / RECORDS / EVIDENCE)
    decision = decide(policy.twin, evidence, decided_at=decided_at)
    has_golden = decision.passed and (VECTORS / GOLDEN_JSON).exists()
    if has_golden:
        refit(VECTORS, folder / GOLDEN, policy=policy.twin, evidence=evidence)
    return EvaluatedFile(
        onnx_path=twin_file(paths.TWIN),
        evidence=evidence,
        decision=decision,
        golden=GoldenFolder.open(folder / GOLDEN) if has_golden else None,
    )

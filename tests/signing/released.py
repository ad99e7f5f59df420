"""A small release in a folder with its signed statements, as a consumer downloads it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gate import Decision, Digest, Evidence, Policy, decide
from gate.onnx_file.reading import read_subject
from gate.signing.keys import SigningKey
from gate.signing.subjects import resource_uri
from gate.signing.verification import StatementPair
from pipelines.trust_file import EditedTrust, KeyTerms
from tests import builders
from tests.golden_vectors import vectors
from tests.registry import releases
from tests.signing import signing

REGISTRY, NAME = "https://mlflow.example.org", "digits"


@dataclass
class ReleaseFolder:
    """The folder and the records of a valid release."""

    folder: Path
    evidence: Evidence
    policy: Policy
    decision: Decision
    statements: StatementPair

    @property
    def model(self) -> Path:
        return self.folder / "model.onnx"

    @property
    def statement(self) -> Path:
        return self.folder / "decision.dsse.json"

    @property
    def trust(self) -> Path:
        return self.folder / "trust.yaml"


def release(
    folder: Path, *, signer: SigningKey | None = None, data: bool = False, **overrides: Any
) -> ReleaseFolder:
    """Write a release with evidence, policy, golden vectors, statements, and a trust in its signer."""
    signer = signer or signing.key()
    make = releases.onnx_file_with_data if data else releases.onnx_file
    model = make(folder / "model.onnx")
    if data:
        single = releases.onnx_file(folder / "single" / "model.onnx")
        arguments = vectors.inputs()
        outputs = {"logits": vectors.ExpectedOutput(arguments @ vectors.weights(single), 1e-4, 1.0)}
        vectors.write_model_vectors(folder / "golden", model, outputs=outputs)
    else:
        vectors.write_model_vectors(folder / "golden", model)
    now = overrides.pop("now", datetime.now(UTC)).isoformat()
    evidence = releases.evidence(model, measured_at=now, **overrides)
    policy = builders.policy()
    decision = decide(policy, evidence, decided_at=now)
    names = (model.name, *read_subject(model).external_data)
    files = {name: Digest.from_file(folder / name) for name in names}
    files["golden/golden.json"] = Digest.from_file(folder / "golden" / "golden.json")
    files["preprocessing"] = builders.digest("spec")
    statements = signing.statements(
        evidence, decision, signer=signer, files=files, resource=resource_uri(REGISTRY, NAME)
    )
    statements.write(folder)
    evidence.save(folder / "evidence.json")
    policy.save(folder / "policy.json")
    trust = EditedTrust(folder / "trust.yaml")
    trust.trust(signer.public, ["measurers"], KeyTerms())
    trust.save()
    return ReleaseFolder(folder, evidence, policy, decision, statements)

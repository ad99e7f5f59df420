"""Releases with statements signed by test keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gate import Digest, Policy, decide
from gate.registry.release import EvaluatedFile, Release
from gate.registry.verify_release import companion_digests
from gate.signing.keys import SigningKey
from gate.signing.predicates import CodeVersion
from gate.signing.subjects import resource_uri
from gate.signing.trust import Trust, TrustedKey
from gate.signing.verification import Signatory, StatementPair
from tests.registry.releases import NAME

CODE = CodeVersion(parity_gate="1", commit="c" * 40, dirty=False)


@dataclass(frozen=True)
class Signing:
    """The signing key, the registered model, and the time of the decision."""

    key: SigningKey
    registry: str = "simulator"
    model: str = NAME
    at: str | None = None
    """None: the current time."""

    def signed(self, release: Release, policy: Policy) -> Release:
        """Return the release, and its twin, with a new decision and signed statements."""
        at = self.at or datetime.now(UTC).isoformat(timespec="seconds")
        extra = dict(companion_digests(release))
        release = replace(release, decision=_decide(release, policy, at))
        if release.twin is not None:
            assert policy.twin is not None
            twin = replace(release.twin, decision=_decide(release.twin, policy.twin, at))
            vectors = twin.golden_sha256
            twin_files = {} if vectors is None else {"golden/golden.json": vectors}
            twin = replace(twin, statements=self._statements(twin, policy.twin, twin_files))
            release = replace(release, twin=twin)
            twin_files |= file_digests(twin)
            extra |= {f"quantized/{name}": digest for name, digest in twin_files.items()}
        return replace(release, statements=self._statements(release, policy, extra))

    def _statements(
        self, evaluated: EvaluatedFile, policy: Policy, extra: Mapping[str, Digest]
    ) -> StatementPair:
        signatory = Signatory(self.key, CODE)
        subjects = {**file_digests(evaluated), **extra}
        resource = resource_uri(self.registry, self.model)
        return StatementPair(
            signatory.sign_measurement(evaluated.evidence, subjects),
            signatory.sign_decision(
                evaluated.decision, subjects, precision=policy.precision, resource=resource
            ),
        )


def file_digests(evaluated: EvaluatedFile) -> dict[str, Digest]:
    """Return the digests of the file and its external data."""
    path = evaluated.onnx_path
    names = (path.name, *evaluated.evidence.subject.external_data)
    return {name: Digest.from_file(path.parent / name) for name in names}


def trust_in(*measurers: SigningKey, **overrides: Any) -> Trust:
    keys = tuple(TrustedKey(**key.public.to_plain()) for key in measurers)
    return Trust(**{"measurers": keys, **overrides})


def save_trust(trust: Trust, path: Path) -> Path:
    """Write the trust as a YAML file with a section `trust:` (JSON is valid YAML)."""
    path.write_text(json.dumps({"trust": trust.to_plain()}))
    return path


def _decide(evaluated: EvaluatedFile, policy: Policy, at: str) -> Any:
    return decide(policy, evaluated.evidence, decided_at=at)

"""Releases with statements, signed by keys of the tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gate.decision.decide import decide
from gate.policy.policy import Policy
from gate.registry.release import EvaluatedFile, Release
from gate.registry.verify_release import companion_digests
from gate.signing.keys import SigningKey
from gate.signing.predicates import CodeVersion
from gate.signing.subjects import resource_uri
from gate.signing.trust import Trust, TrustedKey
from gate.signing.verification import Signatory, StatementPair
from gate.storage.digest import Digest
from tests.registry.releases import NAME

CODE = CodeVersion(parity_gate="1", commit="c" * 40, dirty=False)


@dataclass(frozen=True)
class Signing:
    """Who signs, for which model of which registry, and when it was decided."""

    key: SigningKey
    registry: str = "simulator"
    model: str = NAME
    at: str | None = None
    """None: now."""

    def signed(self, release: Release, policy: Policy) -> Release:
        """The release with a decision of this moment, and statements; its twin likewise."""
        at = self.at or datetime.now(UTC).isoformat(timespec="seconds")
        extra = dict(companion_digests(release))
        release = replace(release, decision=_decided(release, policy, at))
        if release.twin is not None:
            assert policy.twin is not None
            twin = replace(release.twin, decision=_decided(release.twin, policy.twin, at))
            vectors = twin.golden_sha256
            named = {} if vectors is None else {"golden/golden.json": vectors}
            twin = replace(twin, statements=self._statements(twin, policy.twin, named))
            release = replace(release, twin=twin)
            named |= files_of(twin)
            extra |= {f"quantized/{name}": digest for name, digest in named.items()}
        return replace(release, statements=self._statements(release, policy, extra))

    def _statements(
        self, judged: EvaluatedFile, policy: Policy, extra: Mapping[str, Digest]
    ) -> StatementPair:
        who = Signatory(self.key, CODE)
        subjects = {**files_of(judged), **extra}
        resource = resource_uri(self.registry, self.model)
        return StatementPair(
            who.sign_measurement(judged.evidence, subjects),
            who.sign_decision(
                judged.decision, subjects, precision=policy.precision, resource=resource
            ),
        )


def files_of(judged: EvaluatedFile) -> dict[str, Digest]:
    """The file, with its external data."""
    path = judged.onnx_path
    names = (path.name, *judged.evidence.subject.external_data)
    return {name: Digest.from_file(path.parent / name) for name in names}


def trust_in(*measurers: SigningKey, **overrides: Any) -> Trust:
    keys = tuple(TrustedKey(**key.public.to_plain()) for key in measurers)
    return Trust(**{"measurers": keys, **overrides})


def save(trust: Trust, path: Path) -> Path:
    """As a file with a section `trust:`; JSON is YAML."""
    path.write_text(json.dumps({"trust": trust.to_plain()}))
    return path


def _decided(judged: EvaluatedFile, policy: Policy, at: str) -> Any:
    return decide(policy, judged.evidence, decided_at=at)

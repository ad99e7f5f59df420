"""One promotion verifies each signature, hashes the file and decides exactly once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.dsse import Envelope

from gate import Digest
from gate.ledger.ledger import Ledger
from gate.registry import release as releases
from gate.registry.promotion import promote
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Release
from gate.registry.verify_release import VerifiedRelease, verify_release
from gate.signing.keys import SigningKey
from gate.signing.verification import StatementPair
from tests import builders
from tests.registry.releases import MEASURED_AT
from tests.registry.signed import Signing, trust_in
from tests.registry.simulator import Simulator, Watched

POLICY = builders.policy()
MAX_REQUESTS = 51
"""Requests of the first promotion of a model with MLflow 3.17, uploads and downloads included."""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch, first: Release) -> Counter[str]:
    """Counts of verified signatures, decisions, and hashes of the file."""
    counts: Counter[str] = Counter()
    verify, decide = Envelope.verify, releases.decide

    def counted_verify(self: Envelope, *arguments: Any, **options: Any) -> Any:
        counts["signatures"] += 1
        return verify(self, *arguments, **options)

    def counted_decide(*arguments: Any, **options: Any) -> Any:
        counts["decisions"] += 1
        return decide(*arguments, **options)

    def count_hashes(constructor: Any) -> Any:
        def counted_hash(_cls: type[Digest], *arguments: Any) -> Digest:
            created: Digest = constructor(*arguments)
            counts["hashes"] += created == first.evidence.subject.sha256
            return created

        return classmethod(counted_hash)

    monkeypatch.setattr(Envelope, "verify", counted_verify)
    monkeypatch.setattr(releases, "decide", counted_decide)
    for name in ("from_bytes", "from_file"):
        monkeypatch.setattr(Digest, name, count_hashes(getattr(Digest, name)))
    return counts


def test_one_promotion_verifies_hashes_and_decides_once(
    tmp_path: Path, ledger: Ledger, first: Release, counts: Counter[str]
) -> None:
    key = SigningKey.make(tmp_path / "ci.pem")
    signed = Signing(key, at=MEASURED_AT).signed(first, POLICY)
    assert signed.statements is not None
    signed.statements.write(tmp_path)  # the signer verifies what it signed; this is not counted
    signed = replace(signed, statements=StatementPair.from_folder(tmp_path))
    counts.clear()
    registry = Watched(Simulator())
    model = RegisteredModel(registry, ledger, signed.model_name)
    verified = verify_release(
        signed, policy=POLICY, trust=trust_in(key), registries=model.identities()
    )
    # The statements on evidence and decision have one signature each.
    assert counts == {"signatures": 2, "decisions": 1, "hashes": 1}
    assert promote(model, verified).outcome == "promoted"
    # Afterwards only the download is hashed.
    assert counts == {"signatures": 2, "decisions": 1, "hashes": 2}
    assert len(registry.calls) == 16
    assert [call for call in registry.calls if call.startswith(("create", "download"))] == [
        "create_version", "download",
    ]  # fmt: skip


def test_only_verify_release_makes_a_verified_release(first: Release) -> None:
    verified = verify_release(first, policy=POLICY)
    described = verified.described(run_id="another", description="text")
    assert (described.release.run_id, described.release.decision) == (
        "another",
        verified.release.decision,
    )
    with pytest.raises(TypeError, match="verify_release"):
        VerifiedRelease(first, POLICY, (), None, object())
    with pytest.raises(TypeError, match="verify_release"):
        replace(verified, _token=None)

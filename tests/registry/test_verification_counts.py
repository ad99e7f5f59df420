"""One promotion verifies each signature, hashes the file and decides exactly once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.dsse import Envelope

from gate.ledger.ledger import Ledger
from gate.registry import release as releases
from gate.registry.promotion import promote
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Release
from gate.registry.verify_release import VerifiedRelease, verify_release
from gate.signing.keys import SigningKey
from gate.signing.verification import StatementPair
from gate.storage.digest import Digest
from tests import builders
from tests.registry.releases import MEASURED_AT
from tests.registry.signed import Signing, trust_in
from tests.registry.simulator import Simulator, Watched

POLICY = builders.policy()
MOST_REQUESTS = 51
"""Of the first promotion of a model: measured with MLflow 3.17. Uploads and downloads included."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, first: Release) -> Counter[str]:
    """How often a signature was verified, a decision made, and the file hashed."""
    counts: Counter[str] = Counter()
    verify, decide = Envelope.verify, releases.decide

    def counted_verify(self: Envelope, *arguments: Any, **options: Any) -> Any:
        counts["signatures"] += 1
        return verify(self, *arguments, **options)

    def counted_decide(*arguments: Any, **options: Any) -> Any:
        counts["decisions"] += 1
        return decide(*arguments, **options)

    def hashing(make: Any) -> Any:
        def counted_hash(_cls: type[Digest], *arguments: Any) -> Digest:
            created: Digest = make(*arguments)
            counts["hashes"] += created == first.evidence.subject.sha256
            return created

        return classmethod(counted_hash)

    monkeypatch.setattr(Envelope, "verify", counted_verify)
    monkeypatch.setattr(releases, "decide", counted_decide)
    for name in ("from_bytes", "from_file"):
        monkeypatch.setattr(Digest, name, hashing(getattr(Digest, name)))
    return counts


def test_one_promotion_verifies_hashes_and_decides_once(
    tmp_path: Path, ledger: Ledger, first: Release, counted: Counter[str]
) -> None:
    key = SigningKey.make(tmp_path / "ci.pem")
    signed = Signing(key, at=MEASURED_AT).signed(first, POLICY)
    assert signed.statements is not None
    signed.statements.write(tmp_path)  # what signs is verified then, too
    signed = replace(signed, statements=StatementPair.from_folder(tmp_path))
    counted.clear()
    registry = Watched(Simulator())
    model = RegisteredModel(registry, ledger, signed.model_name)
    verified = verify_release(
        signed, policy=POLICY, trust=trust_in(key), registries=model.identities()
    )
    # The statements on evidence and decision, by the one key that is trusted.
    assert counted == {"signatures": 2, "decisions": 1, "hashes": 1}
    assert promote(model, verified).outcome == "promoted"
    # Afterwards only what the registry gives back is hashed.
    assert counted == {"signatures": 2, "decisions": 1, "hashes": 2}
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

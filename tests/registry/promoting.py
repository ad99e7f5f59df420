"""Verify a release, then promote or submit it, as `gate promote` does."""

from __future__ import annotations

from typing import Any

from gate import Policy
from gate.errors import DigestMismatch, EvidenceError, Untrusted
from gate.ledger.entry import plain
from gate.ledger.ledger import Ledger
from gate.registry import promotion
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import PromotionResult, Release
from gate.registry.verify_release import verify_release
from gate.signing.trust import Trust
from tests import builders

DEFAULT = builders.policy()


def promote(
    registry: Any,
    release: Release,
    *,
    ledger: Ledger,
    policy: Policy = DEFAULT,
    trust: Trust | None = None,
) -> PromotionResult:
    model = RegisteredModel(registry, ledger, release.model_name)
    try:
        names = model.identities() if trust else frozenset()
        verified = verify_release(release, policy=policy, trust=trust, registries=names)
    except Untrusted as error:
        return promotion.refuse(model, release, str(error))
    except (DigestMismatch, EvidenceError) as error:
        model.write("refused", str(error), about=release)
        raise
    return promotion.promote(model, verified)


def submit(
    registry: Any, release: Release, *, policy: Policy = DEFAULT, trust: Trust | None = None
) -> PromotionResult:
    names = frozenset({plain(registry.identity)})
    try:
        verified = verify_release(release, policy=policy, trust=trust, registries=names)
    except Untrusted as error:
        return PromotionResult("refused", None, None, str(error))
    model = RegisteredModel(registry, Ledger("sqlite:////dev/null/none.db"), release.model_name)
    return promotion.submit(model, verified)

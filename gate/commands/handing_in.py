"""Who moves `champion`: `gate promote --hand-in` leaves that to the service, `--direct` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gate.attestation.trust import Trust
    from gate.policy.policy import Policy
    from gate.registry.registered_model import RegisteredModel
    from gate.registry.release import Promotion, Release

HAND_IN = click.option(
    "--hand-in/--direct", "handing_in", default=None,
    help="Make a version and the candidate of it, without a ledger, and leave champion to gate "
    "serve; or move champion from here. Default: as the policy says (promotion).",
)  # fmt: skip


def is_handed_in(policy: Policy, given: bool | None) -> bool:
    """As the option says, else as the policy does."""
    return policy.promotion == "by_service" if given is None else given


def hand_over(
    model: RegisteredModel,
    release: Release,
    *,
    policy: Policy,
    trust: Trust,
    handing_in: bool,
) -> Promotion:
    """Hand the release in, or promote it. Raises as `hand_in` and `promote`."""
    from gate.registry.hand_in import hand_in
    from gate.registry.promotion import promote

    if handing_in:
        return hand_in(model.registry, release, policy=policy, trust=trust)
    return promote(model.registry, release, policy=policy, ledger=model.ledger, trust=trust)


def refused(
    model: RegisteredModel, release: Release, reason: str, *, handing_in: bool
) -> Promotion:
    """What nobody vouches for goes nowhere; who has the ledger writes that down. Raises
    EvidenceError, StorageError."""
    from gate.registry.promotion import refuse
    from gate.registry.release import Promotion

    if handing_in:
        return Promotion("refused", None, None, reason)
    return refuse(model, release, reason)

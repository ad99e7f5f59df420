"""Scenarios in which the service has work to do; tests interrupt it at each write."""

from __future__ import annotations

from dataclasses import replace

from gate.ledger.entry import plain
from gate.registry.eligibility import TrustFile
from gate.registry.interface import CHAMPION, Tag
from gate.signing.keys import SigningKey
from tests.registry.promoting import submit
from tests.registry.signed import Signing, save_trust, trust_in
from tests.service.registry_setup import AUTOMATIC, Model


def approval(model: Model) -> None:
    """Make version 1 the champion and approve version 2."""
    model.approve(model.submit_version(1))
    model.reconcile_once()
    model.approve(model.submit_version(2))


def unapproved_champion(model: Model) -> None:
    """Promote versions 1 and 2, then move `champion` by hand to version 3, which was not approved."""
    for seed in (1, 2):
        model.approve(model.submit_version(seed))
        model.reconcile_once()
    model.registry.set_alias(model.name, CHAMPION, model.submit_version(3))


def rejection(model: Model) -> None:
    """Make version 1 the champion and reject the candidate, version 2."""
    model.approve(model.submit_version(1))
    model.reconcile_once()
    model.registry.set_tag(model.name, model.submit_version(2), key=Tag.REVIEW, value="REJECTED")


def submission(model: Model) -> None:
    """Make version 1 the champion and submit version 2 without a ledger."""
    submit_version(model, set_up_trust(model))


def forged_submission(model: Model) -> None:
    """Submit version 2 signed by an untrusted key."""
    set_up_trust(model)
    submit_version(model, SigningKey.make(model.setup.folder / "stranger.pem"))


def set_up_trust(model: Model) -> SigningKey:
    """Make version 1 the champion, require no review, and trust one key."""
    folder = model.setup.folder
    model.policy = model.setup.policy = AUTOMATIC
    model.submit_version(1)
    model.reconcile_once()
    key = SigningKey.make(folder / "ci.pem")
    model.trust = TrustFile(save_trust(trust_in(key), folder / "trust.yaml"))
    return key


def submit_version(model: Model, key: SigningKey) -> None:
    new_release = replace(model.setup.release(2), model_name=model.name, run_id=model.run_id)
    signing = Signing(key, registry=plain(model.registry.identity), model=model.name)
    result = submit(model.registry, signing.signed(new_release, AUTOMATIC), policy=AUTOMATIC)
    assert result.outcome == "handed_in"

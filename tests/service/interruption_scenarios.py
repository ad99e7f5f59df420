"""Scenarios in which the service has something to do; tests interrupt it at each write."""

from __future__ import annotations

from dataclasses import replace

from gate.ledger.entry import plain
from gate.registry.eligibility import TrustFile
from gate.registry.interface import CHAMPION, Tag
from gate.signing.keys import SigningKey
from tests.registry.promoting import submit
from tests.registry.signed import Signing, save, trust_in
from tests.service.registry_setup import AUTOMATIC, Model


def approval(model: Model) -> None:
    """Version 1 serves, version 2 was approved."""
    model.approve(model.submit_version(1))
    model.reconcile_once()
    model.approve(model.submit_version(2))


def unapproved_champion(model: Model) -> None:
    """Versions 1 and 2 served; somebody points champion at 3, which was not approved."""
    for seed in (1, 2):
        model.approve(model.submit_version(seed))
        model.reconcile_once()
    model.registry.set_alias(model.name, CHAMPION, model.submit_version(3))


def rejection(model: Model) -> None:
    """Version 1 serves, version 2 is the candidate and was rejected."""
    model.approve(model.submit_version(1))
    model.reconcile_once()
    model.registry.set_tag(model.name, model.submit_version(2), key=Tag.REVIEW, value="REJECTED")


def submission(model: Model) -> None:
    """Version 1 serves, version 2 was handed in without the ledger."""
    submit_version(model, set_up_trust(model))


def forged_submission(model: Model) -> None:
    """The same, and the key of version 2 is nobody's."""
    set_up_trust(model)
    submit_version(model, SigningKey.make(model.setup.folder / "stranger.pem"))


def set_up_trust(model: Model) -> SigningKey:
    """Version 1 serves, nothing is reviewed, and one key is trusted."""
    folder = model.setup.folder
    model.policy = model.setup.policy = AUTOMATIC
    model.submit_version(1)
    model.reconcile_once()
    key = SigningKey.make(folder / "ci.pem")
    model.trust = TrustFile(save(trust_in(key), folder / "trust.yaml"))
    return key


def submit_version(model: Model, key: SigningKey) -> None:
    of = replace(model.setup.release(2), model_name=model.name, run_id=model.run_id)
    signing = Signing(key, registry=plain(model.registry.identity), model=model.name)
    result = submit(model.registry, signing.signed(of, AUTOMATIC), policy=AUTOMATIC)
    assert result.outcome == "handed_in"

"""What whoever has CI's password can do where two keys must sign a verdict, and two reviewers an
approval."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gate.records.layout import DECISION, RECORDS
from gate.registry.interface import Tag
from gate.registry.release import Release
from gate.registry.reviews import STATEMENT_TAG, ReviewSubmission
from gate.signing.keys import SigningKey
from gate.signing.predicates import Reviewable
from tests import builders
from tests.end_to_end.alterations import edited
from tests.end_to_end.forging import FORGED, STATEMENTS, Victim
from tests.end_to_end.stack import until
from tests.end_to_end.trial import SETTLED_S
from tests.registry.releases import onnx_file

SIGNED = builders.policy(review="signed")
REVIEWERS = ("alice", "bob")


class Watched(Victim):
    """A model of which each verdict has a second signature, and each version two approvals."""

    def folder_of(self, made: Release) -> Path:
        folder = super().folder_of(made)
        co_sign("second")(self, folder)
        return folder

    def once_signed(self, *changes: Callable[[Victim, Path], None]) -> str:
        """Hand in with CI's signature alone, and what these make of it."""
        made = self.release(FORGED)
        folder = super().folder_of(made)
        for change in changes:
            change(self, folder)
        return self.hands.put(folder, made)

    def reviewable(self, number: str) -> Reviewable:
        return ReviewSubmission.read(self.stack.registry, self.name, number).of

    def actions(self) -> list[tuple[str, str | None]]:
        """What the ledger says of the model."""
        lines = self.stack.ledger.entries()
        return [(line.action, line.version) for line in lines if line.model == self.name]

    def state(self, key: SigningKey, of: Reviewable, *, number: str, under: str = "") -> str:
        """Sign an approval of this, and put it on that version; gives the statement."""
        text = of.signed("approved", key, at=datetime.now(UTC)).compact
        self.tag(number, STATEMENT_TAG + (under or key.public.short), text)
        return text


def approve(victim: Victim, number: str, *names: str) -> None:
    """As `gate approve` does, with the keys of these reviewers, or of all."""
    of = ReviewSubmission.read(victim.stack.registry, victim.name, number)
    for name in names or REVIEWERS:
        of.review(victim.stack.registry, "approved", victim.hands.keys[name])


def co_sign(name: str) -> Callable[[Victim, Path], None]:
    """Another signature on both statements, as securesystemslib makes it."""

    def sign(victim: Victim, folder: Path) -> None:
        from securesystemslib.dsse import Envelope

        for place in STATEMENTS:
            envelope = Envelope.from_dict(json.loads((folder / place).read_text()))
            envelope.sign(victim.hands.keys[name].signer)
            (folder / place).write_text(json.dumps(envelope.to_dict()))

    return sign


def copied(name: str | None) -> Callable[[Victim, Path], None]:
    """CI's signature once more, under the id of another key."""

    def copy(victim: Victim, folder: Path) -> None:
        for place in STATEMENTS:
            envelope = json.loads((folder / place).read_text())
            (first,) = envelope["signatures"]
            other = first if name is None else {
                **first, "keyid": victim.hands.keys[name].public.key_id,
            }  # fmt: skip
            (folder / place).write_text(json.dumps(envelope | {"signatures": [first, other]}))

    return copy


def waiting(forge: Callable[[Watched, str], object]) -> Callable[[Watched], str]:
    """A right version, and what somebody then says of it."""

    def handed_in(victim: Watched) -> str:
        number = victim.put(victim.release(FORGED))
        forge(victim, number)
        return number

    return handed_in


def by(*names: str) -> Callable[[Watched, str], None]:
    """Approvals by these keys, whoever they are."""

    def sign(victim: Watched, number: str) -> None:
        for name in names:
            victim.state(victim.hands.keys[name], victim.reviewable(number), number=number)

    return sign


def under_two_names(victim: Watched, number: str) -> None:
    alice, bob = (victim.hands.keys[name] for name in REVIEWERS)
    for key in (alice, bob):
        victim.state(alice, victim.reviewable(number), number=number, under=key.public.short)


def of_version_one(victim: Watched, number: str) -> None:
    """The statements that brought the first version into service."""
    for key, text in victim.tags("1").items():
        if key.startswith(STATEMENT_TAG):
            victim.tag(number, key, text)


def of_another(**other: Any) -> Callable[[Watched, str], None]:
    def sign(victim: Watched, number: str) -> None:
        of = victim.reviewable(number)
        for name in REVIEWERS:
            victim.state(
                victim.hands.keys[name], Reviewable(**{**vars(of), **other}), number=number
            )

    return sign


def turned(victim: Watched, number: str) -> None:
    """Two rejections under other tags' names, whose payload says approved."""
    of = victim.reviewable(number)
    for name in REVIEWERS:
        key = victim.hands.keys[name]
        envelope = json.loads(of.signed("rejected", key, at=datetime.now(UTC)).compact)
        payload = base64.b64decode(envelope["payload"]).replace(b"rejected", b"approved")
        envelope["payload"] = base64.b64encode(payload).decode()
        victim.tag(number, STATEMENT_TAG + key.public.short, json.dumps(envelope))


def tagged(victim: Watched, number: str) -> None:
    victim.tag(number, Tag.REVIEW, "approved")
    victim.tag(number, Tag.REVIEW_RESULT, "approved: became champion")


def exchanged(change: Callable[[Path], object]) -> Callable[[Watched], str]:
    """Files of a version that waits, before reviewers approve what they see."""

    def exchange(victim: Watched) -> str:
        made = victim.release(FORGED)
        folder = victim.folder_of(made)
        number = victim.hands.put(folder, made)
        assert until(lambda: ("passed", number) in victim.actions(), SETTLED_S)
        change(folder)
        client = victim.hands.client
        source = client.get_model_version(victim.name, number).source or ""
        client.log_model_artifacts(source.rpartition("/")[2], str(folder))
        by(*REVIEWERS)(victim, number)
        return number

    return exchange


@dataclass(frozen=True)
class Trick:
    """How it is done, and what the service says of it."""

    forge: Callable[[Watched], str]
    problem: str
    outcome: str = "waits"
    """Or the action of the ledger's line."""


def other_model(folder: Path) -> None:
    onnx_file(folder / "model.onnx", seed=99)


def other_decision(folder: Path) -> None:
    edited(f"{RECORDS}/{DECISION}", runtimes=["ort-cpu"])(folder)


TRICKS: dict[str, Trick] = {
    # two keys must sign a verdict
    "one signature for two": Trick(Watched.once_signed, "is signed by 1 of", "refused"),
    "two signatures of one key": Trick(
        lambda v: v.once_signed(copied(None)), "in a signed DSSE envelope", "refused"
    ),
    "one key under two names": Trick(
        lambda v: v.once_signed(copied("second")), "is signed by 1 of", "refused"
    ),
    "reviewer's signature for the second": Trick(
        lambda v: v.once_signed(co_sign("alice")), "is signed by 1 of", "refused"
    ),
    # two reviewers must approve it
    "review by a tag": Trick(waiting(tagged), "A tag approves nothing here"),
    "review by the measurer": Trick(
        waiting(by("ci", "alice")), "this key vouches for the verdict itself"
    ),
    "review by both measurers": Trick(waiting(by("ci", "second")), "0 of 2 signed approvals"),
    "review by one of two": Trick(waiting(by("alice")), "1 of 2 signed approvals"),
    "review by one under two names": Trick(waiting(under_two_names), "1 of 2 signed approvals"),
    "review by strangers": Trick(
        waiting(by("stranger", "other")), "not among the trusted reviewers"
    ),
    "review by a revoked key": Trick(waiting(by("alice", "revoked")), "1 of 2 signed approvals"),
    "review of another version": Trick(waiting(of_version_one), "it is about version 1"),
    "review of another model": Trick(waiting(of_another(model="x")), "it is about model x"),
    "review of another registry": Trick(
        waiting(of_another(registry="https://elsewhere")), "it is about registry"
    ),
    "rejection edited into an approval": Trick(waiting(turned), "0 of 2 signed approvals"),
    "bytes exchanged while it waits": Trick(
        exchanged(other_model), "has digest", "refused"
    ),
    "decision exchanged while it waits": Trick(
        exchanged(other_decision), "is about decision", "refused"
    ),
}  # fmt: skip

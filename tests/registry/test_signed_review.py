"""`gate approve` and `gate reject` as reviewers use them: against a real MLflow, with no ledger."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gate import cli
from gate.errors import DigestMismatch, EvidenceError, RegistryError, ResourceGone, Untrusted
from gate.ledger.entry import plain as plain_
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry import reviews
from gate.registry.interface import Tag
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Release
from gate.registry.reviews import STATEMENT_LIMIT, STATEMENT_TAG, ReviewSettings, ReviewSubmission
from gate.service.submissions import process_reviews
from gate.signing.keys import KEY_VARIABLE, SigningKey
from gate.signing.statement import SignedStatement
from gate.signing.trust import Trust, TrustedKey
from tests.exhaustive import exhaustive
from tests.registry.promoting import promote
from tests.registry.releases import onnx_file, release
from tests.registry.servers import ADMIN, add_user, let_edit, make_run
from tests.registry.signed import Signing
from tests.service.places import SIGNED

# SQLAlchemy, about MLflow's own tables.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
_names = itertools.count()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


class Shop:
    """A registry with a version that passed and waits; its ledger lies where the service is."""

    def __init__(self, folder: Path, uri: str, run_id: str, *, sign: bool = True) -> None:
        self.uri, self.name, self.run_id = uri, f"digits-{next(_names)}", run_id
        self.folder, self.ledger = folder, Ledger(folder / "service" / "state.db")
        self.at = datetime.now(UTC).isoformat(timespec="seconds")
        self.ci = SigningKey.make(folder / "ci.pem")
        self.registry = MlflowRegistry(uri)
        made = promote(self.registry, self.release(sign), policy=SIGNED, ledger=self.ledger)
        assert made.outcome == "passed"
        assert made.version is not None
        self.number = made.version

    def release(self, sign: bool) -> Release:
        made = release(onnx_file(self.folder / "model.onnx"), policy=SIGNED)
        made = replace(made, model_name=self.name, run_id=self.run_id)
        if not sign:
            return made
        by = Signing(self.ci, registry=plain_(self.uri), model=self.name, at=self.at)
        return by.signed(made, SIGNED)

    @property
    def tags(self) -> Any:
        return self.registry.version(self.name, self.number).tags

    def look(self, *reviewers: SigningKey, threshold: int = 1) -> list[str]:
        """As the service does."""
        trusted = tuple(TrustedKey(**key.public.to_plain()) for key in reviewers)
        trust = Trust(
            measurers=(TrustedKey(**self.ci.public.to_plain()),),
            reviewers=trusted,
            reviewers_threshold=threshold,
        )
        rule = ReviewSettings.from_policy(SIGNED)
        model = RegisteredModel(self.registry, self.ledger, self.name, reviews=rule)
        return [taken.outcome for taken in process_reviews(model, SIGNED, trust=lambda: trust)]  # type: ignore[union-attr]


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    return Shop(tmp_path, uri, make_run(uri, artifacts=tmp_path / "artifacts"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def beside_steps(err: str) -> list[str]:
    """What is more than steps that take long, which a busy machine says."""
    return [line for line in err.splitlines() if not line.endswith(" …")]


def test_what_is_signed_is_shown_and_the_service_counts_it(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alice, bob = (SigningKey.make(tmp_path / f"{name}.pem") for name in ("alice", "bob"))
    where = ("--tracking-uri", shop.uri)
    key = str(tmp_path / "alice.pem")
    code, out, err = run(
        capsys, "approve", shop.name, shop.number, "--key", key, "--comment", "fine", *where
    )
    assert (code, beside_steps(err)) == (0, [])
    entry = shop.ledger.entries()[-1]
    decision = shop.release(sign=True).decision
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if " " in line)
    assert lines["version"].startswith(f"{shop.number} of {shop.name} in sqlite:///")
    assert lines["file"] == str(entry.sha256)
    assert lines["verdict"].startswith("PASS on ort-cpu")
    assert lines["decision"] == str(decision.digest())
    assert lines["signer"] == f"key {shop.ci.public.short}, which the service will verify"
    assert lines["you"] == f"approved, as alice ({alice.public.short})"
    text = shop.tags[f"{STATEMENT_TAG}{alice.public.short}"]
    assert len(text) < 2000
    assert SignedStatement.from_bytes(text.encode()).key_ids == (alice.public.key_id,)
    assert shop.look(alice, bob, threshold=2) == []
    assert shop.tags[Tag.REVIEW_RESULT].startswith("1 of 2 signed approvals (alice")

    code, out, _ = run(
        capsys, "approve", shop.name, shop.number, "--key", f"file:{tmp_path}/bob.pem", "--json",
        "--sha256", str(entry.sha256), *where,
    )  # fmt: skip
    told = json.loads(out)
    assert (code, told["word"], told["key_id"]) == (0, "approved", bob.public.key_id)
    assert (told["digest"], told["decision"]) == (str(entry.sha256), str(decision.digest()))
    assert told["characters"] == len(shop.tags[f"{STATEMENT_TAG}{bob.public.short}"])
    assert shop.look(alice, bob, threshold=2) == ["promoted"]
    assert shop.ledger.entries()[-1].comment == "fine"


def test_a_rejection_is_signed_and_heard_without_any_trust(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = SigningKey.make(tmp_path / "alice.pem")
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "alice.pem"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shop.uri)
    code, out, _ = run(capsys, "reject", shop.name, shop.number, "--comment", "too dark")
    assert code == 0
    assert "signed and stored: rejected\n" in out
    assert shop.tags[Tag.REVIEW] == "rejected"
    assert shop.look() == ["rejected"]
    assert f"{STATEMENT_TAG}{alice.public.short}" in shop.tags


WHY_NOT: dict[str, tuple[str, str | None]] = {
    "alice": ("reviewers: [ALICE]", None),
    "not listed": ("reviewers: [BOB]", "alice (KEY) is not listed"),
    "revoked": ("reviewers: [ALICE], revoked: [WHOLE]", "alice (KEY) is revoked"),
}


@pytest.mark.parametrize("trusting", WHY_NOT)
def test_whether_a_trust_at_hand_counts_the_key_is_said(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str], trusting: str
) -> None:
    alice, bob = (SigningKey.make(tmp_path / f"{name}.pem") for name in ("alice", "bob"))
    keys = {
        name: json.dumps(key.public.to_plain()) for name, key in (("ALICE", alice), ("BOB", bob))
    }
    keys["WHOLE"] = alice.public.key_id
    text, why = WHY_NOT[trusting]
    # At once: a key that is written in base64 may have any of these words in it.
    text = re.sub("ALICE|BOB|WHOLE", lambda word: keys[word[0]], text)
    trust = tmp_path / "trust.yaml"
    measurer = json.dumps(shop.ci.public.to_plain())
    trust.write_text(f"trust: {{measurers: [{measurer}], {text}}}\n")
    given = (shop.name, shop.number, "--tracking-uri", shop.uri, "--trust", str(trust))
    code, out, _ = run(capsys, "approve", *given, "--key", str(tmp_path / "alice.pem"), "--json")
    expected = why and why.replace("KEY", alice.public.short)
    assert code == 0, out
    assert json.loads(out)["trust"] == {
        "path": str(trust), "counts": why is None, "why_not": expected
    }  # fmt: skip
    _, out, _ = run(capsys, "approve", *given, "--key", str(tmp_path / "alice.pem"))
    line = f"trust     {trust} {'counts' if why is None else 'does not count'} this key"
    assert line in out
    assert "The service counts it" not in out


def test_who_measured_is_told_that_his_own_approval_counts_for_nothing(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = json.dumps(shop.ci.public.to_plain())
    trust = tmp_path / "trust.yaml"
    trust.write_text(f"trust: {{measurers: [{own}], reviewers: [{own}]}}\n")
    arguments = (shop.name, shop.number, "--key", str(tmp_path / "ci.pem"), "--json",
                 "--tracking-uri", shop.uri, "--trust", str(trust))  # fmt: skip
    _, out, _ = run(capsys, "approve", *arguments)
    assert "so it can't approve it" in json.loads(out)["trust"]["why_not"]
    _, out, _ = run(capsys, "reject", *arguments)
    assert json.loads(out)["trust"]["counts"] is True


def test_a_version_that_was_refused_before_is_told(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    SigningKey.make(tmp_path / "alice.pem")
    damaged = tmp_path / ".gate" / "trust.yaml"
    damaged.parent.mkdir()
    damaged.write_text("trust: 7\n")
    arguments = (shop.name, shop.number, "--key", "alice.pem", "--tracking-uri", shop.uri)
    _, out, _ = run(capsys, "reject", *arguments, "--json")
    plain = json.loads(out)
    assert (plain["refused_before"], plain["trust"]) == (None, None)
    _, out, _ = run(capsys, "reject", *arguments)
    assert "already refused according to the tag gate.review" in out
    shop.registry.set_tag(shop.name, shop.number, key=Tag.REFUSED, value="it was edited")
    _, out, _ = run(capsys, "reject", *arguments, "--json")
    assert json.loads(out)["refused_before"] == Tag.REFUSED


def test_nobody_vouches_is_shown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    unsigned = Shop(tmp_path, uri, make_run(uri, artifacts=tmp_path / "artifacts"), sign=False)
    key = str(tmp_path / "ci.pem")
    arguments = (unsigned.name, unsigned.number, "--key", key, "--tracking-uri", uri)
    code, out, _ = run(capsys, "approve", *arguments)
    assert code == 0
    assert "not signed: neither evidence nor decision" in out


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no key": (("--key", "nowhere.pem"), "nowhere.pem"),
    "another file": (("--key", "ci.pem", "--sha256", "0" * 64), "has digest"),
    "no digest": (("--key", "ci.pem", "--sha256", "abc"), "64 hex digits"),
    "a long comment": (("--key", "ci.pem", "--comment", "x" * 501), "501 characters, 500 are kept"),
}


@pytest.mark.rows(4)
@pytest.mark.parametrize(("options", "text"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_not_signed(
    shop: Shop, options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--tracking-uri", shop.uri)
    code, _, err = run(capsys, "approve", shop.name, shop.number, *options, *where)
    assert (code, text in err) == (2, True)
    assert not any(key.startswith(STATEMENT_TAG) for key in shop.tags)


def test_there_is_no_such_version(shop: Shop) -> None:
    with pytest.raises(ResourceGone):
        ReviewSubmission.read(shop.registry, shop.name, "7")
    with pytest.raises(ResourceGone):
        ReviewSubmission.read(shop.registry, "nothing", "1")


def test_on_a_terminal_it_is_shown_before_it_is_signed(
    shop: Shop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal:
        """Says no."""

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return "n\n"

    arguments = (shop.name, shop.number, "--key", "ci.pem", "--tracking-uri", shop.uri)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _text: "n")
    code, _, err = run(capsys, "approve", *arguments)
    assert code == 130
    assert "verdict   PASS on ort-cpu" in err
    assert not any(key.startswith(STATEMENT_TAG) for key in shop.tags)
    assert run(capsys, "approve", *arguments, "--yes")[0] == 0


def test_what_a_database_would_refuse_is_refused_before(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviews, "STATEMENT_LIMIT", 500)
    submission = ReviewSubmission.read(shop.registry, shop.name, shop.number)
    with pytest.raises(RegistryError, match="a tag holds at most 500. Shorten the comment"):
        submission.review(shop.registry, "approved", shop.ci)
    assert not any(key.startswith(STATEMENT_TAG) for key in shop.tags)


def test_what_a_tag_can_hold_it_holds(shop: Shop) -> None:
    shop.registry.set_tag(shop.name, shop.number, key="long", value="x" * STATEMENT_LIMIT)
    assert shop.tags["long"] == "x" * STATEMENT_LIMIT


def test_statement_and_decision_that_are_not_of_one_another(shop: Shop, tmp_path: Path) -> None:
    (path,) = (tmp_path / "artifacts").rglob("decision.json")
    text = path.read_text()
    path.write_text(text.replace('"decided_at": "20', '"decided_at": "21'))
    submission = ReviewSubmission.read(shop.registry, shop.name, shop.number)
    with pytest.raises(Untrusted, match="the statement of version 1 of .* is about decision"):
        submission.check()


def test_what_is_too_large_or_missing_is_said(shop: Shop, tmp_path: Path) -> None:
    (path,) = (tmp_path / "artifacts").rglob("decision.json")
    path.write_text(" " * (1 << 25) + path.read_text())
    with pytest.raises(DigestMismatch, match="at most 33554432 are read"):
        ReviewSubmission.read(shop.registry, shop.name, shop.number)
    path.unlink()
    with pytest.raises(EvidenceError, match="cannot read .*decision.json"):
        ReviewSubmission.read(shop.registry, shop.name, shop.number)


@exhaustive
@pytest.mark.proof
@pytest.mark.slow
def test_a_reviewer_needs_to_edit_the_model_and_no_more(
    guarded_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def become(user: str, password: str) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)

    become(*ADMIN)
    shop = Shop(tmp_path, guarded_server.uri, make_run(guarded_server.uri))
    reviewer = (f"reviewer-{shop.name}", "password-of-the-test-reviewer")
    add_user(guarded_server.uri, *reviewer)
    alice = SigningKey.make(tmp_path / "alice.pem")
    arguments = (shop.name, shop.number, "--key", "alice.pem", "--tracking-uri", shop.uri)
    before = shop.ledger.entries()

    become(*reviewer)
    code, _, err = run(capsys, "approve", *arguments)
    assert code == 2
    assert "needs EDIT on the registered model" in err
    let_edit(guarded_server.uri, reviewer[0], model=shop.name)
    code, out, err = run(capsys, "approve", *arguments)
    assert (code, beside_steps(err)) == (0, [])
    assert "signed and stored: approved" in out
    assert shop.ledger.entries() == before
    become(*ADMIN)
    assert shop.look(alice) == ["promoted"]

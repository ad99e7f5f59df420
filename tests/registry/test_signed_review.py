"""`gate approve` and `gate reject` against a real MLflow database, without a ledger."""

from __future__ import annotations

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
from gate.registry.reviews import STATEMENT_TAG, ReviewSettings, ReviewSubmission
from gate.service.submissions import process_reviews
from gate.signing.keys import KEY_VARIABLE, SigningKey
from gate.signing.statement import SignedStatement
from gate.signing.trust import Trust, TrustedKey
from tests.registry.folder_snapshot import FolderSnapshot
from tests.registry.promoting import promote
from tests.registry.releases import onnx_file, release
from tests.registry.servers import make_run
from tests.registry.signed import Signing
from tests.sandbox.in_process import read_in_process
from tests.service.registry_setup import SIGNED


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


class ReviewedModel:
    """A registry with a version that passed and waits for review; the service has the ledger."""

    def __init__(self, folder: Path, uri: str, run_id: str) -> None:
        self.uri, self.name, self.run_id = uri, "digits", run_id
        self.folder, self.ledger = folder, Ledger(folder / "service" / "state.db")
        self.at = datetime.now(UTC).isoformat(timespec="seconds")
        self.ci = SigningKey.make(folder / "ci.pem")
        self.registry = MlflowRegistry(uri)
        created = promote(self.registry, self.release(), policy=SIGNED, ledger=self.ledger)
        assert created.outcome == "passed"
        assert created.version is not None
        self.number = created.version

    def release(self) -> Release:
        created = release(onnx_file(self.folder / "model.onnx"), policy=SIGNED)
        created = replace(created, model_name=self.name, run_id=self.run_id)
        signing = Signing(self.ci, registry=plain_(self.uri), model=self.name, at=self.at)
        return signing.signed(created, SIGNED)

    def command(self, word: str, *options: str) -> tuple[str, ...]:
        return (word, self.name, self.number, "--tracking-uri", self.uri, *options)

    @property
    def tags(self) -> Any:
        return self.registry.version(self.name, self.number).tags

    def process_reviews_once(self, *reviewers: SigningKey, threshold: int = 1) -> list[str]:
        """Process the reviews as the service does."""
        trusted = tuple(TrustedKey(**key.public.to_plain()) for key in reviewers)
        trust = Trust(
            measurers=(TrustedKey(**self.ci.public.to_plain()),),
            reviewers=trusted,
            reviewers_threshold=threshold,
        )
        settings = ReviewSettings.from_policy(SIGNED)
        model = RegisteredModel(self.registry, self.ledger, self.name, reviews=settings)
        return [result.outcome for result in process_reviews(model, SIGNED, trust=lambda: trust)]  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def initial_state(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[ReviewedModel, FolderSnapshot]:
    folder = tmp_path_factory.mktemp("reviewed")
    uri = f"sqlite:///{folder}/mlflow.db"
    with pytest.MonkeyPatch.context() as patched:
        read_in_process(patched)
        created = ReviewedModel(folder, uri, make_run(uri, artifacts=folder / "artifacts"))
    return created, FolderSnapshot(folder)


@pytest.fixture
def reviewed_model(
    initial_state: tuple[ReviewedModel, FolderSnapshot], monkeypatch: pytest.MonkeyPatch
) -> ReviewedModel:
    """The model in its initial state; its folder is the current folder."""
    created, snapshot = initial_state
    monkeypatch.chdir(snapshot.restore())
    created.ledger = Ledger(created.folder / "service" / "state.db")
    return created


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def without_progress(err: str) -> list[str]:
    """Drop the progress lines, which depend on the speed of the machine."""
    return [line for line in err.splitlines() if not line.endswith(" …")]


def test_signed_approvals_are_shown_and_counted_by_the_service(
    reviewed_model: ReviewedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    alice, bob = (SigningKey.make(Path(f"{name}.pem")) for name in ("alice", "bob"))
    key = ("--key", str(Path("alice.pem")))
    code, out, err = run_command(
        capsys, *reviewed_model.command("approve", *key, "--comment", "fine")
    )
    assert (code, without_progress(err)) == (0, [])
    entry = reviewed_model.ledger.entries()[-1]
    decision = reviewed_model.release().decision
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if " " in line)
    assert lines["version"].startswith(
        f"{reviewed_model.number} of {reviewed_model.name} in sqlite:///"
    )
    assert lines["file"] == str(entry.sha256)
    assert lines["verdict"].startswith("PASS on ort-cpu")
    assert lines["decision"] == str(decision.digest())
    assert lines["signer"] == f"key {reviewed_model.ci.public.short}, which the service will verify"
    assert lines["you"] == f"approved, as alice ({alice.public.short})"
    text = reviewed_model.tags[f"{STATEMENT_TAG}{alice.public.short}"]
    assert len(text) < 2000
    assert SignedStatement.from_bytes(text.encode()).key_ids == (alice.public.key_id,)
    assert reviewed_model.process_reviews_once(alice, bob, threshold=2) == []
    assert reviewed_model.tags[Tag.REVIEW_RESULT].startswith("1 of 2 signed approvals (alice")

    key = ("--key", f"file:{reviewed_model.folder}/bob.pem", "--json")
    code, out, _ = run_command(
        capsys, *reviewed_model.command("approve", *key, "--sha256", str(entry.sha256))
    )
    record = json.loads(out)
    assert (code, record["word"], record["key_id"]) == (0, "approved", bob.public.key_id)
    assert (record["digest"], record["decision"]) == (str(entry.sha256), str(decision.digest()))
    assert record["characters"] == len(reviewed_model.tags[f"{STATEMENT_TAG}{bob.public.short}"])
    assert reviewed_model.process_reviews_once(alice, bob, threshold=2) == ["promoted"]
    assert reviewed_model.ledger.entries()[-1].comment == "fine"


def test_signed_rejection_counts_without_trust(
    reviewed_model: ReviewedModel,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alice = SigningKey.make(Path("alice.pem"))
    monkeypatch.setenv(KEY_VARIABLE, str(Path("alice.pem")))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", reviewed_model.uri)
    code, out, _ = run_command(
        capsys, "reject", reviewed_model.name, reviewed_model.number, "--comment", "too dark"
    )
    assert code == 0
    assert "signed and stored: rejected\n" in out
    assert reviewed_model.tags[Tag.REVIEW] == "rejected"
    assert reviewed_model.process_reviews_once() == ["rejected"]
    assert f"{STATEMENT_TAG}{alice.public.short}" in reviewed_model.tags


TRUST_SECTIONS: dict[str, tuple[str, str | None]] = {
    "alice": ("reviewers: [ALICE]", None),
    "not listed": ("reviewers: [BOB]", "alice (KEY) is not listed"),
    "revoked": ("reviewers: [ALICE], revoked: [WHOLE]", "alice (KEY) is revoked"),
}


@pytest.mark.parametrize("trust_section", TRUST_SECTIONS)
def test_approve_reports_whether_the_trust_file_counts_the_key(
    reviewed_model: ReviewedModel,
    capsys: pytest.CaptureFixture[str],
    trust_section: str,
) -> None:
    alice, bob = (SigningKey.make(Path(f"{name}.pem")) for name in ("alice", "bob"))
    keys = {
        name: json.dumps(key.public.to_plain()) for name, key in (("ALICE", alice), ("BOB", bob))
    }
    keys["WHOLE"] = alice.public.key_id
    text, reason = TRUST_SECTIONS[trust_section]
    # One pass over all words: a key in base64 may contain any of them.
    text = re.sub("ALICE|BOB|WHOLE", lambda word: keys[word[0]], text)
    trust = Path("trust.yaml")
    measurer = json.dumps(reviewed_model.ci.public.to_plain())
    trust.write_text(f"trust: {{measurers: [{measurer}], {text}}}\n")
    key = ("--key", str(Path("alice.pem")))
    command = reviewed_model.command("approve", "--trust", str(trust), *key)
    code, out, _ = run_command(capsys, *command, "--json")
    expected = reason and reason.replace("KEY", alice.public.short)
    assert code == 0, out
    assert json.loads(out)["trust"] == {
        "path": str(trust), "counts": reason is None, "why_not": expected
    }  # fmt: skip
    _, out, _ = run_command(capsys, *command)
    line = f"trust     {trust} {'counts' if reason is None else 'does not count'} this key"
    assert line in out
    assert "The service counts it" not in out


def test_measurer_is_warned_that_the_approval_does_not_count(
    reviewed_model: ReviewedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    measurer = json.dumps(reviewed_model.ci.public.to_plain())
    trust = Path("trust.yaml")
    trust.write_text(f"trust: {{measurers: [{measurer}], reviewers: [{measurer}]}}\n")
    options = ("--key", str(Path("ci.pem")), "--json", "--trust", str(trust))
    _, out, _ = run_command(capsys, *reviewed_model.command("approve", *options))
    assert "so it can't approve it" in json.loads(out)["trust"]["why_not"]
    _, out, _ = run_command(capsys, *reviewed_model.command("reject", *options))
    assert json.loads(out)["trust"]["counts"] is True


def test_earlier_refusal_is_reported(
    reviewed_model: ReviewedModel,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    SigningKey.make(Path("alice.pem"))
    damaged = Path(".gate/trust.yaml")
    damaged.parent.mkdir()
    damaged.write_text("trust: 7\n")
    command = reviewed_model.command("reject", "--key", "alice.pem")
    _, out, _ = run_command(capsys, *command, "--json")
    plain = json.loads(out)
    assert (plain["refused_before"], plain["trust"]) == (None, None)
    _, out, _ = run_command(capsys, *command)
    assert "already refused according to the tag gate.review" in out
    reviewed_model.registry.set_tag(
        reviewed_model.name, reviewed_model.number, key=Tag.REFUSED, value="it was edited"
    )
    _, out, _ = run_command(capsys, *command, "--json")
    assert json.loads(out)["refused_before"] == Tag.REFUSED


INVALID_OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "no key": (("--key", "nowhere.pem"), "nowhere.pem"),
    "another file": (("--key", "ci.pem", "--sha256", "0" * 64), "has digest"),
    "no digest": (("--key", "ci.pem", "--sha256", "abc"), "64 hex digits"),
    "a long comment": (("--key", "ci.pem", "--comment", "x" * 501), "501 characters, 500 are kept"),
}


@pytest.mark.rows(4)
@pytest.mark.parametrize(("options", "text"), INVALID_OPTIONS.values(), ids=list(INVALID_OPTIONS))
def test_invalid_options_sign_nothing(
    reviewed_model: ReviewedModel,
    options: tuple[str, ...],
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run_command(capsys, *reviewed_model.command("approve", *options))
    assert (code, text in err) == (2, True)
    assert not any(key.startswith(STATEMENT_TAG) for key in reviewed_model.tags)


def test_missing_version_is_reported(reviewed_model: ReviewedModel) -> None:
    with pytest.raises(ResourceGone):
        ReviewSubmission.read(reviewed_model.registry, reviewed_model.name, "7")
    with pytest.raises(ResourceGone):
        ReviewSubmission.read(reviewed_model.registry, "nothing", "1")


def test_terminal_asks_before_signing(
    reviewed_model: ReviewedModel,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal:
        """A terminal whose user answers no."""

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return "n\n"

    command = reviewed_model.command("approve", "--key", "ci.pem")
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _text: "n")
    code, _, err = run_command(capsys, *command)
    assert code == 130
    assert "verdict   PASS on ort-cpu" in err
    assert not any(key.startswith(STATEMENT_TAG) for key in reviewed_model.tags)
    assert run_command(capsys, *command, "--yes")[0] == 0


def test_statement_too_long_for_a_tag_is_refused(
    reviewed_model: ReviewedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviews, "STATEMENT_LIMIT", 500)
    submission = ReviewSubmission.read(
        reviewed_model.registry, reviewed_model.name, reviewed_model.number
    )
    with pytest.raises(RegistryError, match="a tag holds at most 500. Shorten the comment"):
        submission.review(reviewed_model.registry, "approved", reviewed_model.ci)
    assert not any(key.startswith(STATEMENT_TAG) for key in reviewed_model.tags)


def test_statement_about_another_decision_is_untrusted(reviewed_model: ReviewedModel) -> None:
    (path,) = Path("artifacts").rglob("decision.json")
    text = path.read_text()
    path.write_text(text.replace('"decided_at": "20', '"decided_at": "21'))
    submission = ReviewSubmission.read(
        reviewed_model.registry, reviewed_model.name, reviewed_model.number
    )
    with pytest.raises(Untrusted, match="the statement of version 1 of .* is about decision"):
        submission.check()


def test_oversized_or_missing_decision_is_reported(reviewed_model: ReviewedModel) -> None:
    (path,) = Path("artifacts").rglob("decision.json")
    path.write_text(" " * (1 << 25) + path.read_text())
    with pytest.raises(DigestMismatch, match="at most 33554432 are read"):
        ReviewSubmission.read(reviewed_model.registry, reviewed_model.name, reviewed_model.number)
    path.unlink()
    with pytest.raises(EvidenceError, match="cannot read .*decision.json"):
        ReviewSubmission.read(reviewed_model.registry, reviewed_model.name, reviewed_model.number)

"""Whose word a release is on: every digest in its statements, against what is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gate.errors import Untrusted
from gate.registry.release import Release
from gate.registry.verify_release import claimed_fields, companion_digests, verify_statements
from gate.registry.version_files import Records
from gate.signing.keys import SigningKey
from gate.signing.statement import Resource, SignedStatement, Statement
from gate.signing.verification import StatementPair
from tests import builders
from tests.registry.releases import NAME, onnx_file, onnx_file_with_data, release
from tests.registry.signed import Signing, trust_in
from tests.registry.test_preprocessing_beside import made as with_spec

POLICY = builders.policy()
HERE = frozenset({"simulator"})


@dataclass(frozen=True)
class Signed:
    """A signed release, and who signed it."""

    key: SigningKey
    release: Release

    def verify(self, **given: Any) -> tuple[str, ...]:
        fields = {
            "files": companion_digests(self.release),
            "trust": trust_in(self.key),
            "registries": HERE,
            "now": datetime.now(UTC),
        }
        return tuple(key.key_id for key in verify_statements(self.release, **(fields | given)))

    def with_decision(self, change: Callable[[dict[str, Any]], None]) -> Signed:
        """With another statement on the decision, signed by the same key."""
        assert self.release.statements is not None
        plain = self.release.statements.decision.statement.to_plain()
        change(plain)
        again = SignedStatement.sign(Statement.from_json(json.dumps(plain)), self.key)
        statements = StatementPair(self.release.statements.evidence, again)
        return Signed(self.key, replace(self.release, statements=statements))

    def stated(self, folder: Path) -> dict[str, Any]:
        records = self.release.evidence, self.release.decision, self.release.statements
        Records(*records).write(folder / "gate")
        return claimed_fields(
            folder / "model.onnx",
            model=NAME,
            trust=trust_in(self.key),
            registries=HERE,
            now=datetime.now(UTC),
        )


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey.make(tmp_path / "ci.pem")


@pytest.fixture
def signed(key: SigningKey, tmp_path: Path) -> Signed:
    return Signed(key, Signing(key).signed(with_spec(tmp_path), POLICY))


def test_what_is_signed_is_believed_and_gives_who_signed(signed: Signed) -> None:
    assert signed.verify() == (signed.key.public.key_id,)


def test_what_goes_with_it_has_to_be_named(signed: Signed) -> None:
    for name in ("preprocessing", "golden/golden.json"):
        with pytest.raises(Untrusted, match="The file was exchanged"):
            signed.verify(files={name: builders.digest("another")})


def test_a_registry_may_give_the_file_another_name(signed: Signed) -> None:
    """MLflow calls it model.onnx."""
    moved = signed.release.onnx_path.rename(signed.release.onnx_path.with_name("model.onnx"))
    assert Signed(signed.key, replace(signed.release, onnx_path=moved)).verify()


def test_external_data_is_named_file_by_file(key: SigningKey, tmp_path: Path) -> None:
    instruments = POLICY.instruments.model_copy(update={"graph_forbid": ()})
    policy = POLICY.model_copy(update={"instruments": instruments})
    of = release(onnx_file_with_data(tmp_path / "model.onnx"), policy=policy)
    signed = Signed(key, Signing(key).signed(of, policy))
    assert signed.verify()

    def exchange(plain: dict[str, Any]) -> None:
        plain["subject"][-1]["digest"]["sha256"] = "0" * 64

    with pytest.raises(Untrusted, match="does not name the file"):
        signed.with_decision(exchange).verify()


def _no_file(plain: dict[str, Any]) -> None:
    plain["subject"][0]["digest"]["sha256"] = "0" * 64


def _other_policy(plain: dict[str, Any]) -> None:
    plain["predicate"]["policy"]["digest"]["sha256"] = "0" * 64


def _other_result(plain: dict[str, Any]) -> None:
    plain["predicate"]["verificationResult"] = "FAILED"


@pytest.mark.parametrize("change", [_no_file, _other_policy, _other_result])
def test_a_statement_of_a_trusted_key_that_contradicts_what_is_there(
    signed: Signed, change: Callable[[dict[str, Any]], None]
) -> None:
    with pytest.raises(Untrusted):
        signed.with_decision(change).verify()


def test_what_the_statements_promise_are_the_digests_of_the_release(
    signed: Signed, tmp_path: Path
) -> None:
    fields, of = signed.stated(tmp_path / "down"), signed.release
    assert fields == {
        "sha256": of.decision.subject_sha256,
        "policy_sha256": POLICY.digest(),
        "evidence_sha256": of.evidence.digest(),
        "golden_sha256": None,
        "preprocess_sha256": of.preprocess_sha256,
        "compared_with": None,
        "signers": (signed.key.public.key_id,),
        "measured_by": (),
    }


def _two_pieces(plain: dict[str, Any]) -> None:
    plain["predicate"]["inputAttestations"] *= 2


def _no_digest(plain: dict[str, Any]) -> None:
    plain["predicate"]["policy"]["digest"] = {"sha512": "0" * 128}


def _bad_digest(plain: dict[str, Any]) -> None:
    (spec,) = [each for each in plain["subject"] if each["name"] == "preprocessing"]
    spec["digest"]["sha256"] = "x"


def _twin_that_is_not_there(plain: dict[str, Any]) -> None:
    of = Resource.from_digest(builders.digest("twin"), name="quantized/model.onnx")
    plain["subject"].append(of.to_plain())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_two_pieces, "2 pieces of evidence"),
        (_no_digest, "no SHA-256 digest of the policy"),
        (_bad_digest, "no SHA-256 digest of the preprocessing"),
        (_twin_that_is_not_there, "the quantized twin: there are no statements"),
    ],
)
def test_promises_that_can_not_be_kept(
    signed: Signed, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    with pytest.raises(Untrusted, match=message):
        signed.with_decision(change).stated(tmp_path / "down")


def test_without_statements_there_is_no_promise(tmp_path: Path, key: SigningKey) -> None:
    with pytest.raises(Untrusted, match="there are no statements"):
        Signed(key, release(onnx_file(tmp_path / "model.onnx"))).stated(tmp_path / "down")
    with pytest.raises(Untrusted, match="there are no statements"):
        Signed(key, release(onnx_file(tmp_path / "model.onnx"))).verify()

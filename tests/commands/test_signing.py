"""Signed when measured, and refused where it is not: gate check, then gate promote, on a real MLflow
store."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from gate import cli
from gate.golden.manifest import GoldenManifest
from gate.ledger.ledger import Ledger
from gate.signing.keys import SigningKey
from gate.signing.verification import StatementPair, summary_in
from gate.storage.digest import Digest
from tests.exhaustive import exhaustive
from tests.registry.servers import empty_database
from tests.registry.signed import trust_in
from tests.small_project import made

# SQLAlchemy, about MLflow's own tables.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@dataclass(frozen=True)
class Place:
    """A folder with a registry whose champion is version 1 of `small`, signed by `ci.pem`."""

    folder: Path
    key: SigningKey
    state: Path
    """Of each test its own: lines of a signed ledger ask for a key."""

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder}/mlflow.db"

    def trust(self, name: str = "trust.yaml", *others: SigningKey, **overrides: Any) -> str:
        """The file of a trust in the key, or in others."""
        path = self.folder / name
        trust_in(*(others or (self.key,)), **overrides).save(path)
        return str(path)

    def lines(self) -> list[Any]:
        return list(Ledger(self.state).entries())

    def champion(self) -> str:
        found = MlflowClient(self.uri).get_model_version_by_alias("small", "champion")
        return str(found.version)

    def promote(self, report: Path, *more: str) -> int:
        command = ["promote", str(made() / "good.onnx"), "--report", str(report)]
        command += ["--state", str(self.state)]
        for name, value in {"--name": "small", "--tracking-uri": self.uri}.items():
            command += [] if name in more else [name, value]
        return cli.main([*command, *more])


def check(report: Path, *more: str, file: str = "good.onnx") -> int:
    project = made()
    command = ["check", str(project / file), "--reference", "small_models:build"]
    return cli.main([*command, "--inputs", str(project / "images.npy"), "--report", str(report), *more])  # fmt: skip


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key is at hand."""
    for name in ("MLFLOW_TRACKING_URI", "DVC_EXP_NAME", "GATE_SIGNING_KEY", "GATE_TRUST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def first_place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("place")
    empty_database(folder / "mlflow.db")
    there = Place(folder, SigningKey.make(folder / "ci.pem"), folder / "state.db")
    trust = there.trust()
    bound = ("--key", str(folder / "ci.pem"), "--name", "small", "--tracking-uri", there.uri)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert check(folder / "report", *bound) == 0
        assert there.promote(folder / "report", "--trust", trust) == 0
    assert not (folder / ".gate").exists()
    return there


@pytest.fixture
def place(first_place: Place, tmp_path: Path) -> Place:
    state = tmp_path / "own.db"
    with (
        closing(sqlite3.connect(first_place.state)) as kept,
        closing(sqlite3.connect(state)) as own,
    ):
        kept.backup(own)
    return replace(first_place, state=state)


@pytest.fixture
def report(place: Place, tmp_path: Path) -> Path:
    return Path(shutil.copytree(place.folder / "report", tmp_path / "report"))


@pytest.mark.further
def test_a_verdict_for_this_model_needs_no_key_but_a_trusted_one(
    place: Place, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert place.lines()[0].signers == (place.key.public.key_id,)
    assert place.promote(report, "--trust", place.trust()) == 0
    printed = capsys.readouterr()
    assert f"signed by ci ({place.key.public.short})" in printed.out
    assert set(printed.err.splitlines()) <= {"promoting …"}  # which is said where it takes long
    assert not Path(".gate").exists()


def rewritten(name: str, old: str, new: str) -> Callable[[Path], None]:
    def spoil(report: Path) -> None:
        text = (report / name).read_text()
        assert old in text
        (report / name).write_text(text.replace(old, new, 1))

    return spoil


def without(name: str) -> Callable[[Path], None]:
    return lambda report: (report / name).unlink()


def signed_by_nothing(name: str) -> Callable[[Path], None]:
    def spoil(report: Path) -> None:
        plain = json.loads((report / name).read_text())
        plain["signatures"][0]["sig"] = "AAAA"
        (report / name).write_text(json.dumps(plain))

    return spoil


def wider(report: Path) -> None:
    file = report / "golden" / "golden.json"
    plain = json.loads(file.read_text())
    plain["outputs"][0]["max_abs_diff"] = 1e9
    file.write_text(json.dumps(plain))


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without("evidence.dsse.json"), "the verdict has no statement evidence.dsse.json"),
        (rewritten("evidence.json", '"samples": 64', '"samples": 65'), "evidence was edited"),
        (rewritten("decision.json", '"WAIVED"', '"PASS"'), "decision was edited"),
        (wider, "names golden/golden.json with digest"),
        (without("golden/golden.json"), "names golden/golden.json, which was not submitted"),
    ],
)
def test_a_spoiled_report_is_refused_with_its_reason(
    place: Place, report: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    before = len(place.lines())
    spoil(report)
    assert place.promote(report, "--trust", place.trust()) == 1
    *_, line = place.lines()
    assert (line.action, line.signers, len(place.lines())) == ("refused", (), before + 1)
    assert reason in line.reason
    assert place.champion() == "1"


@exhaustive
@pytest.mark.proof
def test_what_is_for_another_model_is_refused(place: Place, report: Path, tmp_path: Path) -> None:
    SigningKey.make(tmp_path / "other.pem")
    empty_database(tmp_path / "elsewhere.db")
    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"
    good = place.trust()
    for more, reason in (
        (("--trust", good, "--name", "letters"), "expected letters in sqlite:///"),
        (("--trust", good, "--tracking-uri", elsewhere), "gate check --name, or gate promote"),
        # A key that nobody trusts does not make it another verdict.
        (
            ("--trust", good, "--name", "letters", "--key", str(tmp_path / "other.pem")),
            "expected letters in sqlite:///",
        ),
    ):
        assert place.promote(report, *more) == 1, more
        assert place.lines()[-1].action == "refused"
        assert reason in place.lines()[-1].reason
    assert place.champion() == "1"
    assert MlflowClient(elsewhere).search_model_versions("name = 'small'") == []


@pytest.mark.proof
def test_a_measurers_key_signs_the_verdict_anew_for_another_model(
    place: Place, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATE_SIGNING_KEY", f"file:{place.folder / 'ci.pem'}")
    monkeypatch.setenv("GATE_TRUST", place.trust())
    assert place.promote(report, "--name", "letters") == 0
    assert place.lines()[-1].signers == (place.key.public.key_id,)
    # It is no way around: what is edited, or was never signed, is not signed.
    for spoil, reason in (
        (wider, "are not those that were signed"),
        (signed_by_nothing("decision.dsse.json"), "the statement on the decision is signed by 0"),
        (without("decision.dsse.json"), "the verdict has no statement decision.dsse.json"),
    ):
        spoil(report)
        assert place.promote(report, "--name", "letters") == 1
        assert reason in place.lines()[-1].reason


def test_without_a_key_the_folders_own_signs_and_says_whose_word_that_is(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty_database(tmp_path / "mlflow.db")
    here = f"sqlite:///{tmp_path}/mlflow.db"
    word = "signed by the key of this folder, "
    # With a role and a task of the options, which no policy file has: policy.json has them.
    stated = ("--role", "logits=logits", "--task", "classification")
    assert check(Path("report"), *stated) == 0
    printed = capsys.readouterr()
    assert printed.err.count(word) == 1
    assert "signed  by local (" in printed.out
    assert "signed by local (" in Path("report/report.html").read_text()
    assert place.promote(Path("report"), "--tracking-uri", here) == 0
    printed = capsys.readouterr()
    assert word in printed.out
    assert word not in printed.err
    assert cli.main(["report", "report", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["story"]["subject"]["signed_by"]
    assert told.startswith("local (")
    assert cli.main(["report", "report", "--trust", place.trust(), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["story"]["subject"]["signed_by"]
    assert told is None
    secret = Path(".gate/keys/local.pem").read_text().splitlines()[1]
    run = MlflowClient(here).get_model_version("small", "1").run_id
    artifacts = Path(MlflowClient(here).download_artifacts(run, ""))
    assert {"evidence.dsse.json", "decision.dsse.json"} <= {p.name for p in artifacts.iterdir()}
    written = [*artifacts.rglob("*"), *Path("report").rglob("*"), Path("mlflow.db")]
    assert not any(secret.encode() in p.read_bytes() for p in written if p.is_file())


def test_a_rejected_verdict_is_signed_too(place: Place) -> None:
    assert check(Path("report"), "--key", str(place.folder / "ci.pem"), file="bad.onnx") == 1
    verdict = StatementPair.from_folder(Path("report")).decision
    assert verdict.signers([place.key.public]) == (place.key.public,)
    assert summary_in(verdict).verification_result == "FAILED"
    digest = Digest.from_file(made() / "bad.onnx")
    assert summary_in(verdict).resource_uri == f"urn:sha256:{digest.hex}"


def test_what_is_signed_is_what_was_computed_and_not_what_lies_on_the_disk(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody exchanges golden.json the moment it is written."""
    save = GoldenManifest.save

    def exchanged(self: GoldenManifest, path: Path) -> None:
        output = self.outputs[0].model_copy(update={"max_abs_diff": 1e9})
        save(self.model_copy(update={"outputs": (output,)}), path)

    monkeypatch.setattr(GoldenManifest, "save", exchanged)
    bound = ("--key", str(place.folder / "ci.pem"), "--name", "small", "--tracking-uri", place.uri)
    assert check(tmp_path / "report", *bound) == 0
    trust = ("--trust", place.trust(), *bound[:2])
    assert place.promote(tmp_path / "report", *trust) == 1
    assert "are not those that were signed" in place.lines()[-1].reason


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (None, 0o600, "cannot read the signing key"),
        ("no key", 0o644, "has mode 0644"),
    ],
)
def test_a_key_that_is_none_is_said_before_anything_is_measured(
    tmp_path: Path, text: str | None, mode: int, message: str
) -> None:
    if text is not None:
        (tmp_path / "key.pem").write_text(text)
        (tmp_path / "key.pem").chmod(mode)
    project = made()
    line = ["check", str(project / "good.onnx"), "--reference", "small_models:build"]
    line += ["--inputs", str(project / "images.npy"), "--report", "report", "--key", "key.pem"]
    program = (
        "import sys; from gate.cli import main\n"
        "print(main(sys.argv[1:]), sorted({'torch', 'mlflow', 'onnxruntime'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *line],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
        env={"PYTHONPATH": f"{project}:{':'.join(sys.path)}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout == "2 []\n"
    assert message in done.stderr
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("option", [("--key", "ci.pem"), ("--name", "small")])
def test_without_a_report_there_is_nothing_to_sign(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    project = made()
    command = ["check", str(project / "good.onnx"), "--reference", "small_models:build"]
    assert cli.main([*command, "--inputs", str(project / "images.npy"), *option]) == 2
    assert "apply to a report" in capsys.readouterr().err

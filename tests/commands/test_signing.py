"""Signed gate check and gate promote with a real MLflow store."""

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

from gate import Digest, cli
from gate.golden.manifest import GoldenManifest
from gate.ledger.ledger import Ledger
from gate.signing.keys import SigningKey
from gate.signing.verification import StatementPair, summary_in
from tests.registry.servers import empty_database
from tests.registry.signed import trust_in
from tests.small_project import create_project


@dataclass(frozen=True)
class SignedProject:
    """A folder with a registry whose champion is version 1 of `small`, signed by `ci.pem`."""

    folder: Path
    key: SigningKey
    state: Path
    """Each test has its own state, because a signed ledger requires a key for new entries."""

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder}/mlflow.db"

    def trust(self, name: str = "trust.yaml", *others: SigningKey, **overrides: Any) -> str:
        """Write a trust file with this project's key or other keys; return its path."""
        path = self.folder / name
        trust_in(*(others or (self.key,)), **overrides).save(path)
        return str(path)

    def lines(self) -> list[Any]:
        return list(Ledger(self.state).entries())

    def champion(self) -> str:
        result = MlflowClient(self.uri).get_model_version_by_alias("small", "champion")
        return str(result.version)

    def promote(self, report: Path, *more: str) -> int:
        command = ["promote", str(create_project() / "good.onnx"), "--report", str(report)]
        command += ["--state", str(self.state)]
        for name, value in {"--name": "small", "--tracking-uri": self.uri}.items():
            command += [] if name in more else [name, value]
        return cli.main([*command, *more])


def check(report: Path, *more: str, file: str = "good.onnx") -> int:
    project = create_project()
    command = ["check", str(project / file), "--reference", "small_models:build"]
    return cli.main([*command, "--inputs", str(project / "images.npy"), "--report", str(report), *more])  # fmt: skip


@pytest.fixture(autouse=True)
def _no_key_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all variables with keys, and change to an empty folder."""
    for name in ("MLFLOW_TRACKING_URI", "DVC_EXP_NAME", "GATE_SIGNING_KEY", "GATE_TRUST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def shared_project(tmp_path_factory: pytest.TempPathFactory) -> SignedProject:
    folder = tmp_path_factory.mktemp("place")
    empty_database(folder / "mlflow.db")
    project = SignedProject(folder, SigningKey.make(folder / "ci.pem"), folder / "state.db")
    trust = project.trust()
    bound = ("--key", str(folder / "ci.pem"), "--name", "small", "--tracking-uri", project.uri)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert check(folder / "report", *bound) == 0
        assert project.promote(folder / "report", "--trust", trust) == 0
    assert not (folder / ".gate").exists()
    return project


@pytest.fixture
def signed_project(shared_project: SignedProject, tmp_path: Path) -> SignedProject:
    state = tmp_path / "own.db"
    with (
        closing(sqlite3.connect(shared_project.state)) as kept,
        closing(sqlite3.connect(state)) as custom,
    ):
        kept.backup(custom)
    return replace(shared_project, state=state)


@pytest.fixture
def report(signed_project: SignedProject, tmp_path: Path) -> Path:
    return Path(shutil.copytree(signed_project.folder / "report", tmp_path / "report"))


@pytest.mark.further
def test_signed_verdict_is_promoted_without_a_key(
    signed_project: SignedProject, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert signed_project.lines()[0].signers == (signed_project.key.public.key_id,)
    assert signed_project.promote(report, "--trust", signed_project.trust()) == 0
    printed = capsys.readouterr()
    assert f"signed by ci ({signed_project.key.public.short})" in printed.out
    assert set(printed.err.splitlines()) <= {"promoting …"}  # printed only if it takes long
    assert not Path(".gate").exists()


def replace_text(name: str, old: str, new: str) -> Callable[[Path], None]:
    def tamper(report: Path) -> None:
        text = (report / name).read_text()
        assert old in text
        (report / name).write_text(text.replace(old, new, 1))

    return tamper


def remove_file(name: str) -> Callable[[Path], None]:
    return lambda report: (report / name).unlink()


def invalidate_signature(name: str) -> Callable[[Path], None]:
    def tamper(report: Path) -> None:
        plain = json.loads((report / name).read_text())
        plain["signatures"][0]["sig"] = "AAAA"
        (report / name).write_text(json.dumps(plain))

    return tamper


def widen_golden_tolerance(report: Path) -> None:
    file = report / "golden" / "golden.json"
    plain = json.loads(file.read_text())
    plain["outputs"][0]["max_abs_diff"] = 1e9
    file.write_text(json.dumps(plain))


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (
            remove_file("evidence.dsse.json"),
            "the verdict has no statement evidence.dsse.json",
        ),
        (
            replace_text("evidence.json", '"samples": 64', '"samples": 65'),
            "evidence was edited",
        ),
        (replace_text("decision.json", '"WAIVED"', '"PASS"'), "decision was edited"),
        (widen_golden_tolerance, "names golden/golden.json with digest"),
        (
            remove_file("golden/golden.json"),
            "names golden/golden.json, which was not submitted",
        ),
    ],
)
def test_tampered_report_is_refused(
    signed_project: SignedProject, report: Path, tamper: Callable[[Path], None], reason: str
) -> None:
    before = len(signed_project.lines())
    tamper(report)
    assert signed_project.promote(report, "--trust", signed_project.trust()) == 1
    *_, line = signed_project.lines()
    assert (line.action, line.signers, len(signed_project.lines())) == ("refused", (), before + 1)
    assert reason in line.reason
    assert signed_project.champion() == "1"


@pytest.mark.proof
def test_measurer_key_signs_the_verdict_for_another_model(
    signed_project: SignedProject, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATE_SIGNING_KEY", f"file:{signed_project.folder / 'ci.pem'}")
    monkeypatch.setenv("GATE_TRUST", signed_project.trust())
    assert signed_project.promote(report, "--name", "letters") == 0
    assert signed_project.lines()[-1].signers == (signed_project.key.public.key_id,)
    # Signing afterwards is no workaround: edited or unsigned measurements are not signed.
    for tamper, reason in (
        (widen_golden_tolerance, "are not those that were signed"),
        (
            invalidate_signature("decision.dsse.json"),
            "the statement on the decision is signed by 0",
        ),
        (
            remove_file("decision.dsse.json"),
            "the verdict has no statement decision.dsse.json",
        ),
    ):
        tamper(report)
        assert signed_project.promote(report, "--name", "letters") == 1
        assert reason in signed_project.lines()[-1].reason


def test_local_key_signs_when_no_key_is_given(
    signed_project: SignedProject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty_database(tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    message = "signed by the key of this folder, "
    # Role and task come from options, so that only policy.json contains them.
    stated = ("--role", "logits=logits", "--task", "classification")
    assert check(Path("report"), *stated) == 0
    printed = capsys.readouterr()
    assert printed.err.count(message) == 1
    assert "signed  by local (" in printed.out
    assert "signed by local (" in Path("report/report.html").read_text()
    assert signed_project.promote(Path("report"), "--tracking-uri", uri) == 0
    printed = capsys.readouterr()
    assert message in printed.out
    assert message not in printed.err
    assert cli.main(["report", "report", "--json"]) == 0
    printed_json = json.loads(capsys.readouterr().out)["story"]["subject"]["signed_by"]
    assert printed_json.startswith("local (")
    assert cli.main(["report", "report", "--trust", signed_project.trust(), "--json"]) == 0
    printed_json = json.loads(capsys.readouterr().out)["story"]["subject"]["signed_by"]
    assert printed_json is None
    secret = Path(".gate/keys/local.pem").read_text().splitlines()[1]
    run = MlflowClient(uri).get_model_version("small", "1").run_id
    artifacts = Path(MlflowClient(uri).download_artifacts(run, ""))
    assert {"evidence.dsse.json", "decision.dsse.json"} <= {p.name for p in artifacts.iterdir()}
    written = [*artifacts.rglob("*"), *Path("report").rglob("*"), Path("mlflow.db")]
    assert not any(secret.encode() in p.read_bytes() for p in written if p.is_file())


def test_rejected_verdict_is_signed(signed_project: SignedProject) -> None:
    assert (
        check(Path("report"), "--key", str(signed_project.folder / "ci.pem"), file="bad.onnx") == 1
    )
    verdict = StatementPair.from_folder(Path("report")).decision
    assert verdict.signers([signed_project.key.public]) == (signed_project.key.public,)
    assert summary_in(verdict).verification_result == "FAILED"
    digest = Digest.from_file(create_project() / "bad.onnx")
    assert summary_in(verdict).resource_uri == f"urn:sha256:{digest.hex}"


def test_files_replaced_after_writing_are_not_signed(
    signed_project: SignedProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """golden.json is replaced right after it is written."""
    save = GoldenManifest.save

    def exchanged(self: GoldenManifest, path: Path) -> None:
        output = self.outputs[0].model_copy(update={"max_abs_diff": 1e9})
        save(self.model_copy(update={"outputs": (output,)}), path)

    monkeypatch.setattr(GoldenManifest, "save", exchanged)
    bound = (
        "--key",
        str(signed_project.folder / "ci.pem"),
        "--name",
        "small",
        "--tracking-uri",
        signed_project.uri,
    )
    assert check(tmp_path / "report", *bound) == 0
    trust = ("--trust", signed_project.trust(), *bound[:2])
    assert signed_project.promote(tmp_path / "report", *trust) == 1
    assert "are not those that were signed" in signed_project.lines()[-1].reason


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (None, 0o600, "cannot read the signing key"),
        ("no key", 0o644, "has mode 0644"),
    ],
)
def test_invalid_key_is_reported_before_measuring(
    tmp_path: Path, text: str | None, mode: int, message: str
) -> None:
    if text is not None:
        (tmp_path / "key.pem").write_text(text)
        (tmp_path / "key.pem").chmod(mode)
    project = create_project()
    line = ["check", str(project / "good.onnx"), "--reference", "small_models:build"]
    line += ["--inputs", str(project / "images.npy"), "--report", "report", "--key", "key.pem"]
    program = (
        "import sys; from gate.cli import main\n"
        "print(main(sys.argv[1:]), sorted({'torch', 'mlflow', 'onnxruntime'} & set(sys.modules)))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program, *line],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
        env={"PYTHONPATH": f"{project}:{':'.join(sys.path)}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert completed.stdout == "2 []\n"
    assert message in completed.stderr
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("option", [("--key", "ci.pem"), ("--name", "small")])
def test_key_and_name_require_a_report(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    project = create_project()
    command = ["check", str(project / "good.onnx"), "--reference", "small_models:build"]
    assert cli.main([*command, "--inputs", str(project / "images.npy"), *option]) == 2
    assert "apply to a report" in capsys.readouterr().err

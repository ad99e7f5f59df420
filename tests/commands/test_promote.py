"""gate promote, history and rollback with a real MLflow store."""

from __future__ import annotations

import atexit
import functools
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from gate import Digest, cli
from gate.commands.promote import refuse_release, submit_or_promote, uses_submission
from gate.commands.result import ExitCode
from gate.ledger.entry import LedgerEntry, plain
from gate.ledger.ledger import Ledger
from gate.registry.interface import CANDIDATE, CHAMPION
from gate.registry.registered_model import RegisteredModel
from gate.registry.verify_release import verify_release
from gate.signing.keys import SigningKey
from tests import builders
from tests.commands.running import as_json
from tests.exhaustive import exhaustive
from tests.registry.releases import NAME, onnx_file, release
from tests.registry.signed import Signing, trust_in
from tests.registry.simulator import Simulator
from tests.small_project import create_project


@functools.cache
def _create_checked_folder(file: str) -> Path:
    """Return a folder with the report of a check and its signing key, created once."""
    folder = Path(tempfile.mkdtemp(prefix="judged-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _check(file, "report")
    return folder


def _check(file: str, folder: str, *more: str) -> None:
    project = create_project()
    arguments = ["check", str(project / file), "--reference", "small_models:build"]
    cli.main([*arguments, "--inputs", str(project / "images.npy"), "--report", folder, *more])


def _report(file: str, folder: str, capsys: pytest.CaptureFixture[str], *more: str) -> None:
    if more or Path(".gate").exists():
        _check(file, folder, *more)
    else:
        shutil.copytree(_create_checked_folder(file) / "report", folder)
        shutil.copytree(_create_checked_folder(file) / ".gate", ".gate")
    capsys.readouterr()


def _promote(file: str, report: str, *more: str) -> list[str]:
    return ["promote", str(create_project() / file), "--name", "small", "--report", report, *more]


@pytest.mark.further
def test_promote_history_and_rollback_from_the_command_line(work_folder: Path, capsys) -> None:
    _report("good.onnx", "first", capsys)
    code, printed = as_json(capsys, *_promote("good.onnx", "first"))
    assert (code, printed["outcome"], printed["version"]) == (0, "promoted", "1")
    assert (printed["schema_version"], printed["name"], printed["url"]) == (1, "small", None)
    assert printed["digest"] == str(Digest.from_file(create_project() / "good.onnx"))
    code, printed = as_json(capsys, *_promote("good.onnx", "first"))
    assert (code, printed["outcome"], printed["version"]) == (0, "unchanged", "1")

    policy = work_folder / "loose.yaml"
    policy.write_text(
        "instruments: {probes: false, search_inputs: 0, graph_forbid: []}\n"
        "runtimes: {ort-cpu: {required: always, bounds: {scaled_diff: 1.0, top1_agreement: 0.5}}}"
    )
    _report("bad.onnx", "second", capsys, "--policy", "loose.yaml")
    code, printed = as_json(capsys, *_promote("bad.onnx", "second", "--policy", "loose.yaml"))
    assert (code, printed["version"], printed["previous_version"]) == (0, "2", "1")

    store = MlflowClient(f"sqlite:///{work_folder}/mlflow.db")
    told_of = [store.get_model_version("small", number).description for number in "12"]
    assert "no version of small serves yet" in told_of[0]
    assert "`gate rollback small`" in told_of[0]
    assert "gate promote" not in told_of[0]
    assert "Comparison with the champion, version 1:" in told_of[1]

    assert cli.main(["rollback", "small"]) == 2  # no terminal for the confirmation
    assert "add --yes" in capsys.readouterr().err
    code, printed = as_json(capsys, "rollback", "small", "--yes", "--reason", "a test")
    assert (code, printed["outcome"], printed["version"]) == (0, "rolled_back", "1")
    assert (printed["name"], printed["digest"]) == (
        "small",
        str(Digest.from_file(create_project() / "good.onnx")),
    )
    ci = ("--summary", "ci/s.md", "--junit", "ci/j.xml", "--metrics-file", "ci/m.txt")
    code, printed = as_json(capsys, *_promote("bad.onnx", "second", "--policy", "loose.yaml", *ci))
    assert (code, printed["outcome"]) == (1, "refused")
    heading, _, outcome, *_ = (work_folder / "ci" / "s.md").read_text().splitlines()
    assert heading == "## ❌ parity-gate: rejected, the verdict is PASS (small)"
    assert outcome.startswith("`gate promote`: **refused: ")
    (failure,) = re.findall(r'<failure message="(.*?)"', (work_folder / "ci" / "j.xml").read_text())
    assert failure.startswith("refused: ")
    assert 'command="promote",model="small"} 1.0' in (work_folder / "ci" / "m.txt").read_text()

    code, printed = as_json(capsys, "history", "--model", "small")
    actions = [entry["action"] for entry in printed["entries"]]
    assert actions == ["promoted", "unchanged", "promoted", "rolled_back", "refused"]
    assert printed["entries"][0]["sha256"] == str(Digest.from_file(create_project() / "good.onnx"))
    code, printed = as_json(capsys, "history", "--limit", "2")
    assert ([e["action"] for e in printed["entries"]], printed["total"]) == (
        ["rolled_back", "refused"],
        5,
    )
    assert cli.main(["history"]) == 0
    text = capsys.readouterr().out
    assert "rolled_back" in text
    assert "a test" in text
    assert _artifacts(work_folder) >= {
        "evidence.json",
        "report.html",
        "checks.json",
        "numbers.json",
    }


def _artifacts(work_folder: Path) -> set[str]:
    """Return the artifacts of the first promotion's run."""
    (run,) = [path.parent for path in work_folder.glob("mlartifacts/**/report.html")][:1]
    return {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}


def _runs(work_folder: Path) -> list[Any]:
    """Return the runs of the registry's experiment, the oldest first."""
    client = MlflowClient(f"sqlite:///{work_folder}/mlflow.db")
    experiment = client.get_experiment_by_name("parity-gate")
    return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])


@pytest.mark.further
def test_run_of_a_tracked_check_becomes_the_run_of_the_version(work_folder: Path, capsys) -> None:
    """The check and the promotion share one run. A repeated promotion gets its own complete run."""
    _report("good.onnx", "report", capsys, "--track")
    (checked,) = _runs(work_folder)
    digest = Digest.from_file(create_project() / "good.onnx").hex
    assert checked.info.run_name == f"gate PASS {digest[:6]}"
    assert checked.info.status == "FINISHED"
    assert as_json(capsys, *_promote("good.onnx", "report"))[0] == 0
    (run,) = _runs(work_folder)
    assert run.info.run_id == checked.info.run_id
    assert run.data.tags["gate.promotion"] == "promoted"
    assert "#/models/small/versions/1" in run.data.tags["mlflow.note.content"]
    version = MlflowClient(f"sqlite:///{work_folder}/mlflow.db").get_model_version("small", "1")
    assert version.run_id == run.info.run_id
    assert f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}" in version.description

    assert as_json(capsys, *_promote("good.onnx", "report"))[1]["outcome"] == "unchanged"
    first, repeated = _runs(work_folder)
    assert first.data.tags["gate.promotion"] == "promoted"
    assert repeated.data.tags["gate.promotion"] == "unchanged"
    assert (repeated.info.run_name, repeated.data.params) == (run.info.run_name, run.data.params)
    assert repeated.data.metrics == run.data.metrics
    assert set(repeated.data.tags) >= {tag for tag in run.data.tags if tag.startswith("gate.")}


@pytest.mark.parametrize("file", ["good.onnx", "bad.onnx"])
def test_uploaded_report_is_rendered_from_the_records(work_folder: Path, capsys, file: str) -> None:
    _report(file, "report", capsys)
    for name in ("report.html", "report.md", "plots/bound_usage.svg", "localisation.json"):
        (work_folder / "report/plots").mkdir(exist_ok=True)
        (work_folder / "report" / name).write_text("edited by hand")
    (work_folder / "report/plots/other.svg").write_text("edited by hand")
    as_json(capsys, *_promote(file, "report"))
    artifacts = _artifacts(work_folder)
    assert artifacts >= {
        "evidence.json",
        "decision.dsse.json",
        "report.html",
        "report.md",
        "samples.csv",
    }
    uploaded = [path for path in work_folder.glob("mlartifacts/**/*") if path.is_file()]
    assert not [path.name for path in uploaded if b"edited by hand" in path.read_bytes()]


class TestPromoteRefuses:
    @pytest.mark.further
    def test_failing_decision_is_refused(self, work_folder: Path, capsys) -> None:
        _report("bad.onnx", "report", capsys)
        assert cli.main(_promote("bad.onnx", "report")) == 1
        assert "refused" in capsys.readouterr().out
        (run,) = _runs(work_folder)
        assert run.info.status == "FAILED"
        assert run.info.run_name.startswith("gate FAIL ")

    def test_file_that_differs_from_the_checked_one_is_refused(
        self, work_folder: Path, capsys
    ) -> None:
        _report("good.onnx", "report", capsys)
        code, printed = as_json(capsys, *_promote("bad.onnx", "report"))
        assert (code, printed["error"]["type"]) == (2, "DigestMismatch")
        code, printed = as_json(capsys, "history")
        assert [entry["action"] for entry in printed["entries"]] == ["refused"]

    @pytest.mark.further
    def test_edited_decision_is_refused(self, work_folder: Path, capsys) -> None:
        _report("bad.onnx", "report", capsys)
        decision = work_folder / "report/decision.json"
        decision.write_text(decision.read_text().replace('"FAIL"', '"PASS"'))
        code, printed = as_json(capsys, *_promote("bad.onnx", "report"))
        assert (code, printed["outcome"]) == (1, "refused")
        assert "The decision was edited" in printed["reason"]
        (run,) = _runs(work_folder)
        assert run.data.tags["gate.verdict"] == "FAIL"  # computed from evidence and policy

    @pytest.mark.further
    def test_policy_that_differs_from_the_decision_is_refused(
        self, work_folder: Path, capsys
    ) -> None:
        (work_folder / "own.yaml").write_text(
            "runtimes: {ort-cpu: {required: always, bounds: {scaled_diff: 1, top1_agreement: 0}}}"
        )
        _report("bad.onnx", "report", capsys, "--policy", "own.yaml")
        (work_folder / "other.yaml").write_text(
            (work_folder / "own.yaml").read_text().replace("1,", "0.5,")
        )
        code, printed = as_json(capsys, *_promote("bad.onnx", "report", "--policy", "other.yaml"))
        assert (code, printed["error"]["type"]) == (2, "DigestMismatch")
        assert "--policy" in printed["error"]["message"]
        (work_folder / "report/policy.json").unlink()  # older reports have none
        code, printed = as_json(capsys, *_promote("bad.onnx", "report"))
        assert (code, printed["error"]["type"]) == (2, "PolicyError")
        assert "--policy" in printed["error"]["message"]

    @pytest.mark.parametrize("name", ["samples.csv", "plots", "golden"])
    def test_report_with_a_symlink_is_refused(self, work_folder: Path, capsys, name: str) -> None:
        """Nothing is uploaded, neither the target of the link nor other files."""
        _report("bad.onnx", "report", capsys)
        secret = work_folder / "secret"
        secret.mkdir()
        (secret / "key.svg").write_text("hunter2")
        path = work_folder / "report" / name
        path.parent.mkdir(exist_ok=True)
        if path.is_dir():
            path.rename(work_folder / "moved")
        path.unlink(missing_ok=True)
        path.symlink_to(secret if "." not in name else secret / "key.svg")
        code, printed = as_json(capsys, *_promote("bad.onnx", "report"))
        assert (code, printed["error"]["type"]) == (2, "EvidenceError")
        assert str(Path("report", name)) in printed["error"]["message"]
        assert not list(work_folder.glob("mlartifacts/**/*"))
        assert not (work_folder / ".gate/state.db").exists()


def _append_promotion_of_a_missing_version(model: str, work_folder: Path) -> None:
    registry = plain(f"sqlite:///{work_folder}/mlflow.db")
    entry = LedgerEntry(
        action="promoted", registry=registry, model=model, version="1", reason="it passed"
    )
    key = SigningKey.from_file(work_folder / ".gate" / "keys" / "local.pem")
    Ledger(work_folder / ".gate" / "state.db", key=key).append(entry)


@exhaustive
@pytest.mark.proof
def test_reconcile_command_reverts_the_alias_and_deploys(work_folder: Path, capsys) -> None:
    """Reconcile once, as the service does after an event."""
    _report("good.onnx", "report", capsys)
    assert cli.main(_promote("good.onnx", "report")) == 0
    client = MlflowClient(f"sqlite:///{work_folder}/mlflow.db")
    bad_version = client.create_model_version("small", str(create_project() / "bad.onnx"))
    client.set_registered_model_alias("small", "champion", bad_version.version)
    capsys.readouterr()

    command = ("reconcile", "small", "--store", "store")
    code, printed = as_json(capsys, *command)
    assert code == 0
    used = [(item["kind"], item["outcome"]) for item in printed["models"]["small"]]
    assert used == [("guard", "reverted"), ("deploy", "deployed")]
    assert str(client.get_model_version_by_alias("small", "champion").version) == "1"
    (served,) = (work_folder / "store").rglob("model.onnx")
    assert Digest.from_file(served) == Digest.from_file(create_project() / "good.onnx")

    assert as_json(capsys, *command) == (0, printed | {"models": {"small": []}})
    _append_promotion_of_a_missing_version("broken", work_folder)
    code, printed = as_json(capsys, "reconcile", "broken", *command[1:])
    assert (code, printed["models"]["small"]) == (2, [])
    (failed,) = printed["models"]["broken"]
    assert (failed["kind"], failed["outcome"]) == ("look", "failed")
    assert cli.main(["reconcile", "broken", *command[1:]]) == 2
    assert "broken: look: failed: ResourceGone" in capsys.readouterr().out
    assert cli.main([*command]) == 0
    assert "small: nothing to do" in capsys.readouterr().out


DIRECT, BY_SERVICE = builders.policy(), builders.policy(promotion="by_service")


@pytest.mark.parametrize(
    ("policy", "given", "handed_in"),
    [
        (DIRECT, None, False),
        (DIRECT, True, True),
        (BY_SERVICE, None, True),
        (BY_SERVICE, False, False),
    ],
)
def test_release_is_submitted_or_promoted_by_option_or_policy(
    tmp_path: Path, policy, given, handed_in: bool
) -> None:
    registry, ledger = Simulator(), Ledger(tmp_path / "state.db")
    key = SigningKey.make(tmp_path / "ci.pem")
    of = Signing(key).signed(release(onnx_file(tmp_path / "model.onnx"), policy=policy), policy)
    assert uses_submission(policy, given) is handed_in
    model, trust = RegisteredModel(registry, ledger, NAME), trust_in(key)
    verified = verify_release(of, policy=policy, trust=trust, registries=model.identities())
    result = submit_or_promote(model, verified, submits=handed_in)
    assert result.outcome == ("handed_in" if handed_in else "promoted")
    assert registry.aliases == {CANDIDATE: "1"} | ({} if handed_in else {CHAMPION: "1"})
    assert [line.action for line in ledger.entries()] == ([] if handed_in else ["promoted"])


@pytest.mark.parametrize("submits", [True, False])
def test_refusal_is_recorded_only_when_promoting(tmp_path: Path, submits: bool) -> None:
    model = RegisteredModel(Simulator(), Ledger(tmp_path / "state.db"), NAME)
    result = refuse_release(model, release(onnx_file(tmp_path / "m.onnx")), "why", submits=submits)
    assert (result.outcome, result.reason) == ("refused", "why")
    assert len(model.ledger.entries()) == (0 if submits else 1)


@pytest.mark.parametrize(("verdict", "code"), [("PASS", 0), ("FAIL", 1), ("ERROR", 2)])
def test_exit_code_of_a_verdict(verdict: str, code: int) -> None:
    assert int(ExitCode.from_verdict(verdict)) == code


@pytest.mark.parametrize(
    ("outcome", "verdict", "code"),
    [
        ("promoted", "PASS", 0),
        ("passed", "PASS", 0),
        ("unchanged", "PASS", 0),
        ("dry_run", "PASS", 0),
        ("rolled_back", None, 0),
        ("refused", "FAIL", 1),
        ("refused", "ERROR", 2),
        # This file was rolled back or rejected by a reviewer before.
        ("refused", "PASS", 1),
        ("refused", None, 1),
    ],
)
def test_exit_code_of_a_promotion(outcome: str, verdict: str | None, code: int) -> None:
    assert int(ExitCode.from_promotion(outcome, verdict)) == code

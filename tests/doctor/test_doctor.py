from __future__ import annotations

import ctypes
import importlib
import json
import shutil
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest

from gate import cli, installation
from gate.commands import doctor, provider_trial
from gate.commands.doctor import Diagnosis, Symptom, examine_machine
from gate.errors import RegistryUnavailable
from gate.records.runtime import CPU_PROVIDER, CUDA_PROVIDER
from gate.runtimes import ort, selection


@pytest.fixture(scope="module")
def rows() -> tuple[selection.RuntimeStatus, ...]:
    """The status of all runtimes, read once because they run in separate processes for seconds."""
    return selection.runtime_statuses()


@pytest.fixture(autouse=True)
def _listed_once(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[selection.RuntimeStatus, ...]
) -> None:
    monkeypatch.setattr(selection, "runtime_statuses", lambda: rows)
    monkeypatch.setattr(installation, "import_crashes", dict)


def _answer() -> None:
    """Answer like a reachable registry."""


def _examine(folder: Path) -> dict[str, Symptom]:
    diagnosis = examine_machine(folder, registry="sqlite:///here", preflight=_answer)
    return {finding.name: finding for finding in diagnosis.findings}


@pytest.mark.further
def test_this_machine_can_judge_on_the_cpu(tmp_path: Path) -> None:
    diagnosis = examine_machine(tmp_path, registry="sqlite:///here", preflight=_answer)
    assert diagnosis.can_judge
    states = {finding.name: finding.state for finding in diagnosis.findings}
    assert states["ort-cpu"] == states["torch"] == states["MLflow"] == states["DVC"] == "ok"


def test_whatever_is_not_right_says_how_to_mend_it(tmp_path: Path) -> None:
    for finding in _examine(tmp_path).values():
        assert finding.state == "ok" or finding.remedy or finding.name == "CUDA device"


def test_a_provider_counts_only_if_it_ran_a_model() -> None:
    """A listed provider proves nothing: without a CUDA device the session falls back to the CPU."""
    import onnxruntime

    active, _ = doctor.active_provider(CPU_PROVIDER)
    assert active == CPU_PROVIDER
    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        pytest.skip("this build of ONNX Runtime knows no CUDA")
    active, stated = doctor.active_provider(CUDA_PROVIDER)
    result = doctor._cuda_session(device=True)
    assert (result.state == "ok") == (active == CUDA_PROVIDER)
    if active != CUDA_PROVIDER:
        assert doctor.reason_of(stated) in result.seen


class TestWithoutCuda:
    @pytest.fixture(autouse=True)
    def _no_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ort, "cuda_absent_reason", lambda: "no CUDA device on this machine")
        monkeypatch.setattr(doctor, "active_provider", lambda _: (CPU_PROVIDER, ""))
        monkeypatch.setattr(doctor, "_loadable", lambda _: False)

    def test_it_is_absent_and_the_cpu_can_judge(self, tmp_path: Path) -> None:
        result = _examine(tmp_path)
        assert result["CUDA device"].state == result["ort-cuda"].state == "absent"
        assert Diagnosis(tuple(result.values())).can_judge

    def test_a_build_for_the_cpu_is_never_installed_over(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("onnxruntime.cuda_version", "")
        remedy = _examine(tmp_path)["CUDA libraries"].remedy
        assert remedy.startswith("Not needed without a CUDA device. With one: pip uninstall onnxr")


class TestWithADevice:
    @pytest.fixture(autouse=True)
    def _device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ort, "cuda_absent_reason", lambda: None)
        monkeypatch.setattr(ort, "cuda_unusable_reason", lambda: None)
        monkeypatch.setattr(doctor, "_device", lambda: "a card")

    def test_a_fallback_to_the_cpu_is_missing_with_the_reason(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        stated = "[E:onnxruntime] Failed to load x with error: libcudnn.so.9: cannot open\n\x1b[m"
        monkeypatch.setattr(doctor, "active_provider", lambda _: (CPU_PROVIDER, stated))
        result = _examine(tmp_path)["ort-cuda"]
        assert result.state == "missing"
        assert "libcudnn.so.9: cannot open" in result.seen
        assert result.remedy

    def test_missing_libraries_are_named_with_where_they_come_from(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        lacking = {"libcuda.so.1", "libcurand.so.10"}
        monkeypatch.setattr(doctor, "_loadable", lambda name: name not in lacking)
        result = _examine(tmp_path)["CUDA libraries"]
        assert result.state == "missing"
        assert result.seen == "missing: libcuda.so.1, libcurand.so.10"
        assert "driver" in str(result.remedy)
        assert "onnxruntime-gpu[cuda,cudnn]" in str(result.remedy)

    def test_a_device_that_cannot_be_used_is_missing(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(ort, "cuda_unusable_reason", lambda: "PyTorch sees none")
        assert _examine(tmp_path)["CUDA device"].state == "missing"

    def test_all_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(doctor, "_loadable", lambda _: True)
        monkeypatch.setattr(doctor, "active_provider", lambda name: (name, ""))
        result = _examine(tmp_path)
        assert result["CUDA device"].state == result["ort-cuda"].state == "ok"
        assert result["CUDA libraries"].state == "ok"


def _create_trial(**fields: object) -> provider_trial.ProviderTrial:
    complete = {
        "nodes_per_provider": {CUDA_PROVIDER: 9},
        "cpu_nodes": (),
        "exact_error": 2e-7,
        "default_error": 4e-4,
    }
    return provider_trial.ProviderTrial(**complete | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trial", "state"),
    [
        ({}, "ok"),
        ({"cpu_nodes": ("Conv:second/Conv",)}, "missing"),
        ({"nodes_per_provider": {CPU_PROVIDER: 9}}, "missing"),
        ({"exact_error": 4e-4}, "missing"),
        ({"exact_error": float("nan")}, "missing"),
    ],
)
def test_a_real_model_shows_placement_and_tf32(
    monkeypatch: pytest.MonkeyPatch, trial: dict[str, object], state: str
) -> None:
    monkeypatch.setattr(ort, "cuda_absent_reason", lambda: None)
    monkeypatch.setattr(ort, "cuda_unusable_reason", lambda: None)
    monkeypatch.setattr(doctor, "_device", lambda: "a card")
    monkeypatch.setattr(doctor, "active_provider", lambda name: (name, ""))
    monkeypatch.setattr(provider_trial, "try_provider", lambda: _create_trial(**trial))
    matches = {each.name: each for each in doctor.cuda()}
    assert matches["CUDA model"].state == state
    assert bool(matches["CUDA model"].remedy) is (state != "ok")
    assert "on in ONNX Runtime" in matches["TF32"].seen


def test_a_model_that_breaks_on_cuda_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "cuda_absent_reason", lambda: None)
    monkeypatch.setattr(ort, "cuda_unusable_reason", lambda: None)
    monkeypatch.setattr(doctor, "_device", lambda: "a card")
    monkeypatch.setattr(doctor, "active_provider", lambda name: (name, ""))
    monkeypatch.setattr(provider_trial, "try_provider", lambda: 1 / 0)
    matches = {each.name: each for each in doctor.cuda()}
    assert matches["CUDA model"].state == "missing"
    assert "ZeroDivisionError" in matches["CUDA model"].seen


def test_the_model_runs_on_the_provider_that_is_given() -> None:
    trial = provider_trial.try_provider(CPU_PROVIDER)
    assert set(trial.nodes_per_provider) == {CPU_PROVIDER}
    assert any(node.startswith("Conv:") for node in trial.cpu_nodes)
    assert trial.exact_error == trial.default_error == 0.0
    assert not trial.reduces


def test_names_of_libraries_follow_the_cuda_version() -> None:
    assert "libcufft.so.11" in doctor._library_names(12)
    assert "libcufft.so.12" in doctor._library_names(13)


def test_a_library_is_there_only_if_it_loads() -> None:
    assert doctor._loadable("libc.so.6")
    assert not doctor._loadable("libnowhere.so.1")
    assert ctypes.CDLL("libc.so.6")


@pytest.mark.parametrize("name", ["onnxruntime", "torch"])
def test_without_a_needed_package_nothing_can_be_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    real = importlib.import_module

    def broken(module: str) -> object:
        if module == name:
            raise ImportError("libgomp.so.1: cannot open shared object file")
        return real(module)

    monkeypatch.setattr(importlib, "import_module", broken)
    diagnosis = examine_machine(tmp_path, registry="sqlite:///here", preflight=_answer)
    matches = {finding.name: finding for finding in diagnosis.findings}
    assert not diagnosis.can_judge
    assert matches[name].state == "missing"
    assert "libgomp" in matches[name].seen
    package = {"onnxruntime": next(iter(installation.onnx_runtimes()))}.get(name, name)
    assert matches[name].remedy.endswith(f"pip install --force-reinstall {package}")


def test_what_kills_a_process_is_not_imported_but_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        installation, "import_crashes", lambda: {"onnxruntime": "importing it kills"}
    )
    monkeypatch.setattr(doctor, "active_provider", lambda _: pytest.fail("this would be the end"))
    result = _examine(tmp_path)
    assert result["onnxruntime"].state == result["ort-cpu"].state == "missing"
    assert result["onnxruntime"].seen == "importing it kills"
    assert result["onnxruntime"].remedy.startswith("Reinstall it: pip install --force-reins")
    assert result["ort-cpu"].seen == "not tried: onnxruntime would crash this process"
    assert not Diagnosis(tuple(result.values())).can_judge


@pytest.mark.parametrize("lacks", [{"torch"}, {"onnxruntime"}, {"torch", "onnxruntime"}])
def test_without_a_package_cuda_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacks: set[str]
) -> None:
    monkeypatch.setattr(installation, "is_installed", lambda name: name not in lacks)
    result = _examine(tmp_path)["CUDA"]
    assert result.state == "absent"
    assert set(result.seen.removeprefix("not tried without ").split(" and ")) == lacks


def test_a_broken_runtime_is_reported_and_does_not_end_the_doctor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_provider: str) -> tuple[str, str]:
        raise RuntimeError("1 + 1 gave 3")

    monkeypatch.setattr(doctor, "active_provider", broken)
    monkeypatch.setattr(ort, "cuda_absent_reason", lambda: 1 / 0)
    diagnosis = examine_machine(tmp_path, registry="sqlite:///here", preflight=_answer)
    matches = {finding.name: finding for finding in diagnosis.findings}
    assert not diagnosis.can_judge
    assert "1 + 1 gave 3" in matches["ort-cpu"].seen
    assert matches["CUDA"].state == "missing"


def test_two_onnxruntime_packages_are_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    result = _examine(tmp_path)["one onnxruntime package"]
    assert result.state == "conflict"
    assert "overwrite each other" in result.seen
    assert "onnxruntime-openvino 1.0" in result.seen
    assert "pip install 'parity-gate[openvino]'" in result.remedy


def test_a_registry_that_is_down_does_not_hinder_judging(tmp_path: Path) -> None:
    def down() -> None:
        raise RegistryUnavailable("no answer from http://127.0.0.1:1")

    diagnosis = examine_machine(tmp_path, registry="http://127.0.0.1:1", preflight=down)
    matches = {finding.name: finding for finding in diagnosis.findings}
    assert matches["MLflow"].state == "missing"
    assert diagnosis.can_judge


def test_a_full_disk_and_no_dvc_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    real = metadata.version

    def version(name: str) -> str:
        if name == "dvc":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    result = _examine(tmp_path)
    assert result["disk"].state == "missing"
    assert result["DVC"].state == "absent"
    assert "parity-gate[pipeline]" in str(result["DVC"].remedy)


class TestCommand:
    def test_table_and_json(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        assert cli.main(["doctor"]) == 0
        text = capsys.readouterr().out
        assert "can judge files on the CPU" in text
        assert f"sqlite:///{tmp_path}/mlflow.db" in text
        assert cli.main(["doctor", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert (record["can_judge"], record["exit_code"]) == (True, 0)
        assert list(tmp_path.iterdir()) == []

    def test_it_ends_with_2_where_nothing_can_be_judged(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bad = Diagnosis((Symptom("torch", "missing", "gone", "Install it again.", needed=True),))
        monkeypatch.setattr(doctor, "examine_machine", lambda *_, **__: bad)
        assert cli.main(["doctor"]) == 2
        text = capsys.readouterr().out
        assert "torch: Install it again." in text
        assert "can't judge" in text

    def test_a_password_in_the_address_is_not_shown(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:1")
        assert cli.main(["doctor"]) == 0
        assert "secret" not in capsys.readouterr().out

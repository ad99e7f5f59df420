"""A missing extra or a package that can't be imported is reported in one line."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gate import cli, installation
from gate.errors import PackageBroken, PackageMissing
from tests.golden_vectors import vectors
from tests.hidden import CALLER_CODE, ROOT, run_without
from tests.signing.released import release

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = {
    module for modules in installation.EXTRAS.values() for module in modules
} | {"torch", "torchvision", "onnxruntime", "pandas", "alembic", "sklearn", "flask"}  # fmt: skip
"""Modules that the core does not need."""
PACKAGES = {"PIL": "pillow", "cv2": "opencv-python-headless", "sklearn": "scikit-learn",
            "mlflow": "mlflow-skinny", "anyio": "starlette"}  # fmt: skip
"""Packages whose name differs from their module, or that are installed with another package."""
CHECK = ("model.onnx", "--reference", "mine:build", "--inputs", "samples.npy")
LINES = {
    "check": CHECK,
    "plan": (*CHECK, "--output", "new.json", "--units", "2"),
    "measure": ("plan.json", "--unit", "0", "-o", "new.json"),
    "merge": ("plan.json", "part.json"),
    "locate": CHECK,
    "reproduce": (".", "--model", "model.onnx", "--inputs", "samples.npy", "--output", "bug.zip"),
    "lint": ("mine:build",),
    "export": ("mine:build", "--example-input", "samples.npy", "--output", "new.onnx"),
    "export compare": ("mine:build", "--example-input", "samples.npy"),
    "mend": ("--reference", "mine:build", "--inputs", "samples.npy", "--output", "new"),
    "preprocess compare": ("photos",),
    "quantize": ("model.onnx", "--calibration", "samples.npy", "--output", "twin.onnx"),
    "samples export": ("model.onnx", "--inputs", "samples.npy", "-o", "there"),
    "promote": ("model.onnx", "--name", "mine", "--report", "folder"),
    "approve": ("mine", "1", "--key", "ci.pem"),
    "reject": ("mine", "1", "--key", "ci.pem"),
    "rollback": ("mine", "--yes"),
    "history": (),
    "history export": (),
    "history checkpoint": (),
    "accept-ledger": ("--reason", "meant"),
    "override": ("mine", "--champion", "1", "--reason", "meant"),
    "verify-release": ("model.onnx", "--golden", "golden"),
    "deploy": ("mine", "--store", "store", "--file", "model.onnx"),
    "serve": ("--model", "mine"),
    "reconcile": ("mine",),
    "webhooks list": (),
    "webhooks register": ("--url", "http://127.0.0.1:1/webhooks/mlflow", "--secret-file", "s"),
    "webhooks test": (),
}


def test_each_command_names_its_missing_extra_in_one_line(tmp_path: Path) -> None:
    for name in ("model.onnx", "samples.npy", "plan.json", "part.json", "ci.pem"):
        (tmp_path / name).write_bytes(b"{}")
    for name in ("folder", "golden", "photos"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine.py").write_text("def build(): ...\n")
    assert LINES.keys() == installation.COMMANDS.keys()
    lines = [[*command.split(), *rest] for command, rest in LINES.items()]
    answers = run_without(OPTIONAL, lines, folder=tmp_path)
    for command, answer in zip(LINES, answers, strict=True):
        needs = dict.fromkeys(installation.remedy(name) for name in installation.COMMANDS[command])
        assert answer == (2, "", f"error: gate {command} {'; it '.join(needs)}\n")


def test_core_commands_need_no_extra() -> None:
    first = {command.split()[0] for command in installation.COMMANDS}
    assert set(cli.COMMANDS) - first == {
        "report", "verify-verdict", "keys", "deployed", "runtimes", "record", "doctor",
        "init", "policy", "schema",
    }  # fmt: skip


@pytest.mark.proof
def test_core_verifies_and_reports(tmp_path: Path) -> None:
    created = release(tmp_path / "released")
    page = tmp_path / "page.html"
    (tmp_path / "store").mkdir()
    help_, verdict, again, report, deployed, runtimes = run_without(
        OPTIONAL,
        [
            ["--help"],
            ["verify-verdict", str(created.statement), "--model", str(created.model), "--trust", str(created.trust)],
            ["verify-verdict", str(created.statement), "--model", str(created.model), "--trust", str(created.trust),
             "--evidence", str(created.folder / "evidence.json"), "--policy", str(created.folder / "policy.json")],
            ["report", str(created.folder), "--policy", str(created.folder / "policy.json"), "--output", str(page)],
            ["deployed", "--store", str(tmp_path / "store")],
            ["runtimes"],
        ],
        folder=tmp_path,
    )  # fmt: skip
    assert help_.code == verdict.code == again.code == report.code == deployed.code == 0, report.err
    assert "TRUSTED PASSED" in verdict.out
    assert "Traceback" not in runtimes.err
    assert "Drawn with matplotlib: pip install 'parity-gate[charts]'" in page.read_text()


@pytest.mark.proof
def test_onnx_runtime_extra_executes_a_release(tmp_path: Path) -> None:
    vectors.write_model_and_vectors(tmp_path)
    verified, deployed = run_without(
        OPTIONAL - {"onnxruntime"},
        [
            ["verify-release", "model.onnx", "--golden", "golden"],
            ["deploy", "mine", "--store", "store", "--file", "model.onnx", "--golden", "golden"],
        ],
        folder=tmp_path,
    )
    assert (verified.code, verified.out.splitlines()[0]) == (0, "PASS"), verified.err
    assert deployed.code == 0, deployed.err


@pytest.mark.proof
def test_service_starts_without_packages_of_other_extras(tmp_path: Path) -> None:
    """The registry is unreachable, which is as far as a test without a server gets."""
    mine = {"onnxruntime", *installation.EXTRAS["service"]}
    (tmp_path / "secrets").write_text(f"{'a' * 64}\n")
    (tmp_path / "secrets").chmod(0o600)
    serve, history, database = run_without(
        OPTIONAL - mine,
        [
            ["serve", "--model", "m", "--secret-file", "secrets", "--tracking-uri", "http://127.0.0.1:1"],
            ["history"],
            ["serve", "--model", "m", "--secret-file", "secrets", "--tracking-uri", "sqlite:///m.db"],
        ],
        folder=tmp_path,
    )  # fmt: skip
    assert "no answer from http://127.0.0.1:1" in serve.err
    assert "there is no ledger" in history.err
    assert "gate serve needs the whole MLflow" in database.err


def test_missing_third_party_module_is_not_an_extra() -> None:
    error = ModuleNotFoundError("No module named 'mypackage'", name="mypackage.models")
    assert installation.extra_of(error) is None
    assert installation.missing(error) is None
    assert installation.missing(ImportError("sqlalchemy")) is None
    result = installation.missing(ModuleNotFoundError(name="sqlalchemy.orm"))
    assert str(result) == "needs parity-gate[registry]: pip install 'parity-gate[registry]'"


def test_empty_folder_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip leaves an empty folder if two packages shared it, which Python treats as a package."""
    (tmp_path / "leftpackage").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not installation.is_installed("leftpackage")
    (tmp_path / "leftpackage" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert installation.is_installed("leftpackage")


def test_extras_match_the_documentation() -> None:
    for extra, modules in installation.EXTRAS.items():
        for module in modules:
            assert PACKAGES.get(module, module) in _names(extra), (extra, module)
    for module, extra in installation._FURTHER.items():
        assert PACKAGES.get(module, module) in _names(extra), (extra, module)


def test_only_two_extras_install_onnx_runtime() -> None:
    """These packages overwrite each other's files (docs/install.md)."""
    runtimes = re.compile(r"onnxruntime(-[a-z]+)?$")
    assert not [name for name in _names_of(PROJECT["dependencies"]) if runtimes.match(name)]
    brings = {
        extra: {name for name in _names(extra, linux=True) if runtimes.match(name)}
        for extra in PROJECT["optional-dependencies"]
    }
    assert {extra for extra, result in brings.items() if result} == {"cpu", "cuda", "dev"}
    assert brings["cpu"] == {"onnxruntime"}
    assert brings["cuda"] == brings["dev"] == {"onnxruntime-gpu"}


def test_core_has_no_large_dependency() -> None:
    core = _names_of(PROJECT["dependencies"])
    assert not core & {"torch", "torchvision", "mlflow", "mlflow-skinny", "dvc", "scikit-learn",
                       "matplotlib", "pandas", "sqlalchemy"}  # fmt: skip


def test_extra_all_contains_every_other_extra() -> None:
    """Except server-grpc, which restricts other packages."""
    left_out = {"cpu", "cuda", "dev", "docs", "server-grpc"}
    everything = set().union(*map(_names, PROJECT["optional-dependencies"].keys() - left_out))
    assert _names("all") == everything


def _names(extra: str, *, linux: bool = False) -> set[str]:
    """Return the packages of an extra, including those of extras that it names."""
    matches: set[str] = set()
    for line in PROJECT["optional-dependencies"][extra]:
        if linux and "sys_platform == 'darwin'" in line:
            continue
        inner = re.match(r"parity-gate\[([a-z,]+)\]", line)
        if inner is None:
            matches |= _names_of([line])
        else:
            matches = matches.union(*(_names(name, linux=linux) for name in inner[1].split(",")))
    return matches


def _names_of(lines: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9._-]+", line)[0].lower() for line in lines}


LIBRARY = "libgomp.so.1: cannot open shared object file"
BROKEN = {
    "a library is missing": f"raise ImportError({LIBRARY!r})",
    "loaded by ctypes": f"raise OSError({LIBRARY!r})",
    "half of it was removed": "from onnxruntime.capi import _pybind_state",
    "nothing is left in it": "",
    "loads and is not whole": "__version__ = '1.0'",
    "loads late": f"__version__ = '1.0'\ndef __getattr__(name):\n    raise ImportError({LIBRARY!r})",
}


def _write_package(folder: Path, package: str, text: str) -> None:
    (folder / "path" / package).mkdir(parents=True)
    (folder / "path" / package / "__init__.py").write_text(text)


def _run_lines(folder: Path, lines: list[list[str]]) -> list[tuple[int, str, str]]:
    """Run command lines in a process that finds the packages of `folder` first; return their
    outputs."""
    custom = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "GATE_", "COV_"))}
    custom["PYTHONPATH"] = os.pathsep.join((str(folder / "path"), str(ROOT)))
    completed = subprocess.run(
        [sys.executable, "-c", CALLER_CODE, json.dumps(lines)],
        cwd=folder, env=custom, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    return [tuple(each) for each in json.loads(completed.stdout.splitlines()[-1])[0]]


@pytest.mark.further
@pytest.mark.rows(4)
@pytest.mark.parametrize("how", BROKEN)
def test_broken_onnx_runtime_rejects_no_release(tmp_path: Path, how: str) -> None:
    vectors.write_model_and_vectors(tmp_path)
    _write_package(tmp_path, "onnxruntime", BROKEN[how])
    ((code, out, err),) = _run_lines(
        tmp_path, [["verify-release", "model.onnx", "--golden", "golden"]]
    )
    assert (code, out) == (2, "")
    lead = "error: gate verify-release needs ONNX Runtime, and the one that is installed does not"
    assert err.splitlines()[-1].startswith(lead)  # earlier lines show progress
    assert "pip install --force-reinstall onnxruntime" in err
    assert "gate doctor" in err


def test_broken_pytorch_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\ndef build(): ...\n")
    _write_package(tmp_path, "torch", BROKEN["loaded by ctypes"])
    ((code, out, err),) = _run_lines(tmp_path, [["lint", "mine:build"]])
    assert (code, out) == (2, "")
    lead = "error: gate lint needs PyTorch, and the one that is installed does not"
    assert err.splitlines()[-1].startswith(lead)
    assert LIBRARY in err


def test_loadable_package_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.find_broken("verify-release") is None
    assert installation.find_broken("keys") is None
    assert installation.onnx_runtime().InferenceSession
    monkeypatch.setattr(installation, "is_installed", lambda _: False)
    # not installed, which is another error
    assert installation.find_broken("verify-release") is None
    with pytest.raises(PackageMissing) as raised:
        installation.onnx_runtime()
    assert not isinstance(raised.value, PackageBroken)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("import os; os.kill(os.getpid(), 7)", "importing it kills the process by SIGBUS"),
        ("raise ImportError('it says so itself')", ""),
    ],
)
def test_crashing_import_is_tried_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, how: str
) -> None:
    _write_package(tmp_path, "deadlypackage", text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    assert installation._import_crash("deadlypackage") == how
    installation._import_crash.cache_clear()

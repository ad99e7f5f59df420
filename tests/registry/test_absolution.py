"""`gate absolve`, on a real MLflow database: which violations are lifted, and what follows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gate import cli
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.promotion import promote
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Release
from tests.registry.kept_folder import KeptFolder
from tests.registry.releases import NAME, onnx_file, release
from tests.registry.servers import make_run
from tests.service.places import AUTOMATIC as POLICY

# SQLAlchemy, about MLflow's own tables.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


class Condemned:
    """A registry, and two releases for it."""

    def __init__(self, folder: Path) -> None:
        self.uri, self.artifacts = f"sqlite:///{folder}/mlflow.db", folder / "artifacts"
        self.run_id = make_run(self.uri, artifacts=self.artifacts)
        ledger = Ledger(folder / "ledger.db")
        self.model = RegisteredModel(MlflowRegistry(self.uri), ledger, NAME)
        self.releases = [self.release(folder, seed) for seed in (1, 2)]

    def condemn(self) -> None:
        """Promote both as versions 1 and 2, and write a violation of version 2."""
        for of in self.releases:
            self.promote(of)
        self.model.write("violation", "a page came", version="2")

    def release(self, folder: Path, seed: int) -> Release:
        return replace(release(onnx_file(folder / f"{seed}.onnx", seed=seed)), run_id=self.run_id)

    def promote(self, of: Release) -> str | None:
        done = promote(self.model.registry, of, policy=POLICY, ledger=self.model.ledger)
        return done.version

    def file(self, number: str, name: str) -> Path:
        """Where it lies, for its editor."""
        wanted = self.releases[int(number) - 1].onnx_path.read_bytes()
        found = [p for p in self.artifacts.rglob("model.onnx") if p.read_bytes() == wanted]
        return next(p.parent / name for p in found if (p.parent / "MLmodel").exists())

    def lines(self) -> list[tuple[str, str | None]]:
        return [(entry.action, entry.version) for entry in self.model.ledger.entries()]

    def absolve(self, version: str, capsys: Any, *more: str, name: str = NAME) -> tuple[int, Any]:
        arguments = ["absolve", name, version, "--tracking-uri", self.uri]
        arguments += ["--state", self.model.ledger.place, "--json", *more]
        if "--reason" not in more:
            arguments += ["--reason", "the proxy was broken"]
        code = cli.main(arguments)
        out = capsys.readouterr().out
        return code, json.loads(out) if out else None


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> KeptFolder:
    folder = tmp_path_factory.mktemp("condemned")
    Condemned(folder).condemn()
    return KeptFolder(folder)


@pytest.fixture
def place(kept: KeptFolder) -> Condemned:
    return Condemned(kept.again())


def test_a_violation_is_lifted_once_and_no_alias_moves(place: Condemned, capsys) -> None:
    registry = place.model.registry
    registry.delete_alias(NAME, "champion")
    code, answer = place.absolve("2", capsys)
    assert (code, answer["outcome"], answer["version"]) == (0, "absolved", "2")
    line = place.model.ledger.entries()[-1]
    assert (line.action, line.version, line.reason) == ("absolved", "2", "the proxy was broken")
    assert line.actor
    assert line.sha256 == place.releases[1].decision.subject_sha256
    assert registry.alias(NAME, "champion") is None
    before = place.lines()
    assert place.absolve("2", capsys)[0] == 2
    assert place.lines() == before
    assert place.promote(place.releases[1]) == "2"


def test_until_then_the_same_bytes_get_a_version_of_their_own(place: Condemned) -> None:
    assert place.promote(place.releases[1]) == "3"


def overwrite(name: str, data: bytes | None = None) -> Callable[[Condemned], object]:
    def spoil(place: Condemned) -> None:
        path = place.file("2", name)
        path.write_bytes(path.read_bytes() + b"\0" if data is None else data)

    return spoil


def away(place: Condemned) -> None:
    shutil.rmtree(place.file("2", "MLmodel").parent)


def spoil_both(place: Condemned) -> None:
    for number in ("1", "2"):
        path = place.file(number, "model.onnx")
        path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (overwrite("model.onnx"), 1),
        (overwrite("gate/evidence.json"), 1),
        (overwrite("gate/decision.json"), 1),
        (overwrite("gate/decision.json", b"{}"), 1),
        (overwrite("MLmodel", b"flavors: []"), 1),
        (overwrite("model.onnx", b"<html>busy</html>"), 2),
        (overwrite("gate/evidence.json", b""), 2),
        (spoil_both, 2),
        (away, 2),
    ],
)
def test_a_violation_stands_while_the_bytes_are_not_proven(place, capsys, spoil, code) -> None:
    spoil(place)
    assert place.absolve("2", capsys)[0] == code
    assert "absolved" not in dict(place.lines())
    assert "violation" in place.model.history().since_passed("2")


@pytest.mark.rows(4)
@pytest.mark.parametrize("action", ["rolled_back", "rejected", "refused", None])
def test_nothing_else_is_lifted(place: Condemned, capsys, action: str | None) -> None:
    if action == "rolled_back":
        place.model.write("rolled_back", "worse", version="2", previous="1")
    elif action is not None:
        place.model.write(action, "no", version="1")  # type: ignore[arg-type]
    before = place.lines()
    code, answer = place.absolve("1", capsys)
    assert (code, answer["error"]["type"]) == (2, "RegistryError")
    assert "no violation to lift" in answer["error"]["message"]
    assert place.lines() == before


@pytest.mark.parametrize(
    ("version", "name", "words"),
    [("7", NAME, "no violation to lift"), ("2", "another", "no violation to lift")],
)
def test_what_is_not_there(place: Condemned, capsys, version, name, words) -> None:
    code, answer = place.absolve(version, capsys, name=name)
    assert code == 2
    assert words in answer["error"]["message"]


def test_what_never_passed_is_not_absolved(place: Condemned, capsys) -> None:
    place.model.write("violation", "it came back changed", version="3")
    code, answer = place.absolve("3", capsys)
    assert code == 2
    assert "ever passed" in answer["error"]["message"]


def test_a_rollback_outlives_the_absolution(place: Condemned, capsys) -> None:
    place.model.write("rolled_back", "worse", version="1", previous="2")
    assert place.absolve("2", capsys)[0] == 0
    assert place.model.history().rollback_of("2") is not None


def test_a_reason_is_needed(place: Condemned, capsys) -> None:
    assert place.absolve("2", capsys, "--reason", " ")[0] == 2
    assert "absolved" not in dict(place.lines())
    arguments = ["absolve", NAME, "2", "--tracking-uri", place.uri]
    assert cli.main([*arguments, "--state", place.model.ledger.place]) == 2
    assert "--reason" in capsys.readouterr().err


def test_for_people_it_says_what_is_next(place: Condemned, capsys) -> None:
    arguments = ["absolve", NAME, "2", "--tracking-uri", place.uri, "--reason", "a bad disk"]
    assert cli.main([*arguments, "--state", place.model.ledger.place]) == 0
    text = capsys.readouterr().out
    assert "absolved: version 2" in text
    assert "No alias was moved" in text

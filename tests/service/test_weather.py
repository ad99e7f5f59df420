"""What is gone, away or full, in a real MLflow database: no step and no model waits for another."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from mlflow import MlflowClient

from gate.errors import ResourceGone
from gate.registry.mlflow.process import lent
from gate.registry.port import CHAMPION
from tests.service.places import Model, fill

pytestmark = pytest.mark.slow


class Registered(Model):
    """With what an editor of the registry does to it."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder}/mlflow.db"
        super().__init__(folder, self.uri, "digits")
        self.artifacts = folder / "artifacts"

    def edit(self, what: str, *arguments: str) -> None:
        with lent(self.uri):
            getattr(MlflowClient(self.uri, self.uri), what)(*arguments)

    def serve(self, seed: int) -> str:
        number = self.hand_in(seed)
        self.approve(number)
        self.look()
        return number

    @property
    def champion(self) -> str | None:
        return self.registry.alias(self.name, CHAMPION)

    @property
    def lines(self) -> list[tuple[str, str | None]]:
        return self.place.lines()


@pytest.fixture
def model(tmp_path: Path) -> Registered:
    return Registered(tmp_path)


def test_a_deleted_version_that_waited_stops_nobody(model: Registered) -> None:
    model.serve(1)
    gone, good = model.hand_in(2), model.hand_in(3)
    model.edit("delete_model_version", model.name, gone)
    model.approve(good)
    model.look()
    assert model.champion == good
    assert ("deployed", good) in model.lines
    assert ("refused", gone) in model.lines
    assert model.look() == 0


def test_a_renamed_model_condemns_nothing(model: Registered) -> None:
    model.serve(1)
    model.hand_in(2)
    before = model.state()
    model.edit("rename_registered_model", model.name, "other")
    with pytest.raises(ResourceGone, match="deleted or renamed"):
        model.look()
    assert model.lines == [line[:2] for line in before["lines"]]
    model.edit("rename_registered_model", "other", model.name)
    assert model.look() == 0
    assert model.state() == before


def test_a_fallback_that_was_deleted_keeps_no_version_in_service(model: Registered) -> None:
    good, bad = model.serve(1), model.hand_in(2)
    model.edit("delete_model_version", model.name, good)
    model.registry.set_alias(model.name, CHAMPION, bad)
    model.look()
    assert model.champion is None
    assert model.lines[-1] == ("reverted", None)
    assert model.look() == 0


@pytest.fixture
def full_folder(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files go to a disk that is full."""
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    return disk


def test_while_no_fallback_can_be_had_nothing_serves(model: Registered) -> None:
    good, bad = model.serve(1), model.hand_in(2)
    model.artifacts.rename(model.artifacts.with_name("away"))
    model.registry.set_alias(model.name, CHAMPION, bad)
    model.look()
    assert model.champion is None
    assert model.lines[-1] == ("reverted", None)
    assert "was taken away" in model.place.ledger.entries()[-1].reason
    before = model.state()
    model.look()
    assert model.state() == before
    model.artifacts.with_name("away").rename(model.artifacts)
    model.look()
    assert model.champion == good
    assert model.look() == 0


def test_while_the_temporary_folder_is_full_nothing_serves(
    model: Registered, full_folder: Path
) -> None:
    good, bad = model.serve(1), model.hand_in(2)
    model.registry.set_alias(model.name, CHAMPION, bad)
    fill(full_folder)
    model.look()
    assert model.champion is None
    (full_folder / "rest").unlink()
    model.look()
    assert model.champion == good
    assert ("violation", good) not in model.lines

"""What is gone, away or full, in a real MLflow database: no step and no model waits for another."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from gate.errors import ResourceGone
from gate.mlflow_client.connection import using_tracking_uri
from gate.registry.interface import CHAMPION
from gate.registry.registered_model import MismatchMemory, Reading
from gate.service.reconciler import Reconciler
from tests.registry.releases import onnx_file
from tests.service.places import REVIEWED, Model, fill

pytestmark = [pytest.mark.slow, pytest.mark.proof]


class Registered(Model):
    """With what an editor of the registry does to it."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder}/mlflow.db"
        super().__init__(folder, self.uri, "digits")
        self.artifacts = folder / "artifacts"

    def edit(self, what: str, *arguments: str) -> None:
        with using_tracking_uri(self.uri):
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


class Watched(Registered):
    """Looked at by one service, which remembers, with a clock of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.now = 0.0
        reading = Reading(mismatches=MismatchMemory(60.0, wait=None, clock=lambda: self.now))
        self.reconcile = Reconciler(
            self.registry, self.place.ledger, REVIEWED, store=self.store, reading=reading
        )

    def look(self, *, after: float = 0.0) -> int:
        """Gives the number of things that were done, or failed."""
        self.now += after
        return len(self.reconcile(self.name, cause="timer"))

    def look_thoroughly(self, *, after: float = 0.0) -> int:
        """As after ten minutes without an event."""
        self.reconcile._proven.clear()
        return self.look(after=after)

    def files(self, number: str) -> list[Path]:
        """Where the bytes of a version lie: the only word on that is what it was made of."""
        wanted = Path(self.place.folder / f"{number}.onnx").read_bytes()
        return [path for path in self.artifacts.rglob("model.onnx") if path.read_bytes() == wanted]

    def overwrite(self, number: str, data: bytes) -> Callable[[], None]:
        """What an editor, or the weather, does to a version; gives what mends it."""
        kept = {path: path.read_bytes() for path in self.files(number)}
        assert kept
        for path in kept:
            path.write_bytes(data)
        return lambda: [path.write_bytes(whole) for path, whole in kept.items()] and None

    def evil(self, seed: int) -> bytes:
        return onnx_file(self.place.folder / "evil.onnx", seed=seed).read_bytes()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    """Versions 1 to 3 served and were deployed; 3 does."""
    made = Watched(tmp_path)
    assert [made.serve(seed) for seed in (1, 2, 3)] == ["1", "2", "3"]
    assert made.look() == 0
    return made


@pytest.mark.proof
def test_the_same_wrong_bytes_after_the_pause_take_the_alias_back(watched: Watched) -> None:
    mend = watched.overwrite("3", watched.evil(7))
    for after in (0, 30, 29):
        assert watched.look_thoroughly(after=after) == 1
        assert watched.champion == "3"
    assert watched.look(after=2) == 2  # as before: the alias goes back, and that is deployed
    assert watched.champion == "2"
    assert watched.lines[-2:] == [("reverted", "2"), ("deployed", "2")]
    mend()
    mend = watched.overwrite("3", watched.evil(7))  # the same once more is no second download
    watched.registry.set_alias(watched.name, CHAMPION, "3")
    watched.look(after=61)
    assert watched.champion == "2"
    mend()
    watched.registry.set_alias(watched.name, CHAMPION, "3")
    watched.look()
    assert (watched.champion, watched.lines[-1]) == ("3", ("deployed", "3"))


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

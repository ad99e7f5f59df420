"""After a kill at any change of the disk the name resolves to a complete release."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from pathlib import Path

import pytest

from gate.deploy.deploy import Deployment, deploy, rollback_deployment
from gate.deploy.store import ModelStore
from tests.deploy import killed_deployment, models
from tests.deploy.models import NAME, assert_complete, assert_digests_match, assert_no_leftovers
from tests.exhaustive import exhaustive

FIRST, SECOND, THIRD = (1,), (2, 3), (4, 5)
"""Seeds of the slots of three releases."""
DEPLOYMENT_CHANGES = {
    "rename tmp", "fsync tmp", "rename store", "fsync store",
    "symlink tmp", "rename releases", "fsync releases", "symlink live", "replace live",
    "fsync live", "rmtree tmp",
}  # fmt: skip
ROLLBACK_CHANGES = {
    "symlink tmp", "fsync tmp", "rename releases", "fsync releases", "symlink live",
    "replace live", "fsync live", "rmtree tmp",
}  # fmt: skip
LIVE_CHANGE = "replace live"
"""The new release serves after this change."""


@pytest.fixture(scope="module")
def context() -> multiprocessing.context.BaseContext:
    """A multiprocessing context whose fork server has imported everything."""
    created = multiprocessing.get_context("forkserver")
    created.set_forkserver_preload(["tests.deploy.killed_deployment"])
    return created


def _slots(files: Path, seeds: tuple[int, ...]):
    labels = ("exact", "quantized")
    return {label: models.source(files, seed) for label, seed in zip(labels, seeds, strict=False)}


def _run_and_kill(
    context, root: Path, files: Path, seeds: tuple[int, ...], survived: int
) -> tuple[list[str], bool]:
    """Run the deployment until it is killed; return its changes and whether it was killed."""
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(
        target=killed_deployment.deploy_and_die, args=(root, files, seeds, survived, writer)
    )
    process.start()
    writer.close()
    process.join(60)
    changes = []
    while reader.poll():
        try:
            changes.append(reader.recv())
        except EOFError:
            break
    reader.close()
    assert process.exitcode in (0, -signal.SIGKILL)
    return changes, process.exitcode != 0


@pytest.mark.proof
@pytest.mark.parametrize(
    "before",
    [
        pytest.param((), id="empty", marks=exhaustive),
        pytest.param((FIRST, SECOND), id="two"),
    ],
)
def test_next_deployment_finishes_a_killed_one(context, tmp_path: Path, before) -> None:
    pristine = ModelStore(tmp_path / "pristine", keep=1)
    files = tmp_path / "files"
    for seeds in before:
        assert deploy(pristine, NAME, _slots(files, seeds)).outcome == "deployed"
    expected = {label: source.sha256 for label, source in _slots(files, THIRD).items()}
    old = assert_complete(pristine) if before else None
    changes: list[str] = []
    for survived in range(1000):
        store = ModelStore(tmp_path / f"srv-{survived}", keep=1)
        shutil.copytree(pristine.root, store.root, symlinks=True) if before else None
        changes, killed = _run_and_kill(context, store.root, files, THIRD, survived)
        assert_digests_match(store)
        live = store.live(NAME)
        if live is None:
            assert not before
            assert LIVE_CHANGE not in changes
        else:
            digests = {label: slot.sha256 for label, slot in assert_complete(store).slots.items()}
            is_live = LIVE_CHANGE in changes
            assert (digests == expected) is is_live, changes
            assert is_live or live == old
        redeployed = deploy(store, NAME, _slots(files, THIRD))
        assert redeployed.outcome == ("unchanged" if LIVE_CHANGE in changes else "deployed"), (
            redeployed.reason
        )
        live = assert_complete(store)
        assert {label: slot.sha256 for label, slot in live.slots.items()} == expected
        if old is not None:  # the previous release can still be restored
            assert [earlier.release for earlier in live.previous] == [old.release]
            assert_no_leftovers(store)
            assert _roll_back(store).slots == old.slots
        shutil.rmtree(store.root)
        if not killed:
            break
    assert set(changes) >= DEPLOYMENT_CHANGES
    assert changes.count("rename store") == 4  # two files and their golden vectors
    # Files that are no longer referenced are first renamed into the staging folder: a release, its
    # model file, its vectors.
    removed = changes[changes.index(LIVE_CHANGE) :].count("rename tmp")
    assert removed == (3 if len(before) == 2 else 0)


def _roll_back(store: ModelStore):
    result: Deployment = rollback_deployment(store, NAME)
    assert result.outcome == "rolled_back", result.reason
    return assert_complete(store)


def test_next_rollback_finishes_a_killed_one(context, tmp_path: Path) -> None:
    pristine, files = ModelStore(tmp_path / "pristine", keep=1), tmp_path / "files"
    for seeds in (FIRST, SECOND):
        assert deploy(pristine, NAME, _slots(files, seeds)).outcome == "deployed"
    changes: list[str] = []
    for survived in range(1000):
        store = ModelStore(tmp_path / f"srv-{survived}", keep=1)
        shutil.copytree(pristine.root, store.root, symlinks=True)
        changes, killed = _run_and_kill(context, store.root, files, (), survived)
        live = assert_complete(store)
        assert live.release == (3 if LIVE_CHANGE in changes else 2)
        assert len(live.slots) == (1 if LIVE_CHANGE in changes else 2)
        if LIVE_CHANGE not in changes:
            assert rollback_deployment(store, NAME).outcome == "rolled_back"
        live = assert_complete(store)
        assert (live.release, live.rolled_back_to) == (3, 1)
        assert deploy(store, NAME, _slots(files, FIRST)).outcome == "unchanged"
        assert_no_leftovers(store)
        shutil.rmtree(store.root)
        if not killed:
            break
    assert set(changes) >= ROLLBACK_CHANGES

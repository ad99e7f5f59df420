from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from gate.errors import PromotionConflict, StorageError
from gate.registry import lock as lock_module
from gate.registry.ledger import Ledger
from gate.registry.lock import promotion_lock


def _hold_and_die(path: Path) -> None:
    with promotion_lock(Ledger(path)):
        os._exit(9)


def test_a_second_holder_is_told_about_the_first(ledger: Ledger) -> None:
    with promotion_lock(ledger):
        with pytest.raises(PromotionConflict, match=f"process {os.getpid()} on ") as caught:
            promotion_lock(ledger).__enter__()
        assert "Nothing was changed" in str(caught.value)
    with promotion_lock(ledger):
        pass


def test_a_holder_that_died_holds_nothing(ledger: Ledger) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_hold_and_die, args=(ledger.path,)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    with promotion_lock(ledger):
        pass


def test_a_holder_that_is_about_to_write_its_name_is_waited_for(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with promotion_lock(ledger):
        holder = next(ledger.path.parent.glob("*.holder"))
        name = holder.read_text()
        holder.unlink()
        monkeypatch.setattr(lock_module.time, "sleep", lambda _: holder.write_text(name))
        with pytest.raises(PromotionConflict, match=f"process {os.getpid()} on "):
            promotion_lock(ledger).__enter__()


def test_a_holder_without_a_name(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_PAUSE_S", 0.0)
    with promotion_lock(ledger):
        next(ledger.path.parent.glob("*.holder")).write_text("{}")
        with pytest.raises(PromotionConflict, match="does not say its name"):
            promotion_lock(ledger).__enter__()


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StorageError, match="cannot lock"),
        promotion_lock(Ledger(tmp_path / "file" / "ledger.jsonl")),
    ):
        pass

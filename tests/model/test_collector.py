"""The garbage collector pauses during imports and is always enabled afterwards."""

from __future__ import annotations

import gc

import pytest

from gate.model.factory import paused_gc


@pytest.fixture(autouse=True)
def _as_it_was():
    frozen = gc.get_freeze_count()
    yield
    assert gc.get_freeze_count() == frozen == 0
    gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_collection_is_paused(fails) -> None:
    try:
        with paused_gc():
            assert not gc.isenabled()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert gc.isenabled()


def test_loaded_objects_are_frozen() -> None:
    with paused_gc():
        loaded = [[] for _ in range(5000)]
    assert len(gc.get_objects(generation=0)) < len(loaded)
    assert len(gc.get_objects(generation=2)) > len(loaded)


def test_disabled_garbage_collection_stays_disabled() -> None:
    gc.disable()
    with paused_gc():
        pass
    assert not gc.isenabled()

"""The loaded code is compared with the source, without calling custom `__getattr__` methods."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from gate.model import source_code

SOURCE = """
class MakesUp:
    def __getattr__(self, name):
        raise RuntimeError(f"asked for {name}")


switches = MakesUp()


class Net:
    @staticmethod
    def scale(x):
        return x * 2

    @classmethod
    def made(cls):
        return cls()

    @property
    def size(self):
        return 1
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "made_up.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("made_up")
    yield SOURCE
    del sys.modules["made_up"]


def test_dynamic_attributes_are_not_accessed(source: str) -> None:
    assert not source_code.differs("made_up", source.encode())


@pytest.mark.parametrize(
    ("old", "new"), [("x * 2", "x * 3"), ("cls()", "None"), ("return 1", "return 2")]
)
def test_each_kind_of_method_is_compared_with_its_source(source: str, old: str, new: str) -> None:
    assert source_code.differs("made_up", source.replace(old, new).encode())

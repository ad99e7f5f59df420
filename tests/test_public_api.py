"""`import gate` provides the public names and loads nothing heavy."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import gate
from tests.exhaustive import for_each

PACKAGE = Path(gate.__file__).parent


@for_each(gate.__all__)
def test_each_public_name_exists_and_is_documented(name: str) -> None:
    public = getattr(gate, name)
    assert public.__doc__
    module = importlib.import_module(public.__module__)
    assert getattr(module, name) is public


def test_no_package_has_the_name_of_a_public_function() -> None:
    """Importing a package of that name would replace the function."""
    packages = {path.stem for path in PACKAGE.iterdir()}
    assert not packages & set(gate.__all__)


def test_unknown_attribute_is_refused() -> None:
    with pytest.raises(AttributeError, match="no public name 'told'"):
        gate.told  # noqa: B018


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, gate; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "pydantic", "onnx"} & set(eval(completed.stdout))


def test_dir_lists_it() -> None:
    assert set(gate.__all__) <= set(dir(gate))

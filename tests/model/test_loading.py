from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gate.errors import ModelError
from gate.measure.job import Reference
from gate.model.checkpoint import save_checkpoint
from gate.model.loading import build_model
from tests.export.nets import Small

NETS_MODULE = "tests.export.nets"


@pytest.mark.parametrize(
    "factory", [f"{NETS_MODULE}:Small", f"{NETS_MODULE}:Holder.small", f"{NETS_MODULE}:seeded"]
)
def test_factory_builds_the_model(factory: str) -> None:
    assert isinstance(build_model(factory), Small)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("", "not a factory"),
        ("torchvision.models.resnet18", "not a factory"),
        (f"{NETS_MODULE}:", "not a factory"),
        (":Small", "not a factory"),
        (f"{NETS_MODULE}:Small()", "not a factory"),
        (f"{NETS_MODULE}:Small:again", "not a factory"),
        ("../nets:Small", "not a factory"),
        ("tests/export/nets.py:Small", "Did you mean tests.export.nets:Small"),
        (f"{NETS_MODULE}:fails_inside", "KeyError: 'weights' (nets.py:"),
        ("model.onnx", "gate check judges ONNX files"),
        ("no_such_package.models:Small", "no module named 'no_such_package'"),
        (f"{NETS_MODULE}.deeper:Small", "no module named"),
        (f"{NETS_MODULE}:Smal", "It has: AlwaysDropout"),
        (f"{NETS_MODULE}:Holder.other", "has no 'Holder.other'"),
        (f"{NETS_MODULE}:Holder.number", "is an object of type int"),
        (f"{NETS_MODULE}:READY", "is already a model"),
        (f"{NETS_MODULE}:not_a_module", "type str, expected an nn.Module"),
        (f"{NETS_MODULE}:needs_arguments", "without arguments"),
        (f"{NETS_MODULE}:leaves", "SystemExit"),
    ],
)
def test_invalid_factory_is_refused(factory: str, says: str) -> None:
    with pytest.raises(ModelError, match=re.escape(says)):
        build_model(factory)


def test_model_without_values_is_refused() -> None:
    with pytest.raises(ModelError, match="device 'meta'"):
        Reference.from_factory(f"{NETS_MODULE}:on_meta")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_current_folder_is_importable(folder: Path) -> None:
    (folder / "own_net_of_user.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Linear(2, 2)\n"
    )
    assert isinstance(build_model("own_net_of_user:build"), nn.Linear)


def test_working_directory_is_restored(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "moving_net_of_user.py").write_text(
        "import os\nfrom torch import nn\ndef build():\n"
        "    os.chdir('elsewhere')\n    return nn.Linear(2, 2)\n"
    )
    build_model("moving_net_of_user:build")
    assert Path.cwd() == folder


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import a_missing_library", "needs the module 'a_missing_library'"),
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(1)", "SystemExit"),
    ],
)
def test_import_error_is_described(folder: Path, source: str, says: str) -> None:
    (folder / "broken_net_of_user.py").write_text(source)
    with pytest.raises(ModelError, match=says):
        build_model("broken_net_of_user:build")


FACTORIES = """\
import functools
import numpy as np
import torch
from torch import nn

calls = []

def unseeded():
    return nn.Linear(2, 2)

def by_numpy():
    model = seeded()
    model.weight.data = torch.from_numpy(np.random.normal(size=(2, 2)).astype(np.float32))
    return model

class Buffered(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("noise", torch.rand(3), persistent=persistent)

def buffer():
    return Buffered(True)

def seeded():
    torch.manual_seed(0)
    return nn.Linear(2, 2)

def with_nan():
    model = seeded()
    model.weight.data[0, 0] = float("nan")
    return model

def scratch():
    return Buffered(False)

@functools.cache
def kept():
    return nn.Linear(2, 2)

def lazy():
    return nn.LazyLinear(2)

def half():
    return seeded().to(torch.bfloat16)

def empty():
    return nn.Identity()
"""


def reference(folder: Path, factory: str, **options: bool) -> Reference:
    (folder / "factories_of_user.py").write_text(FACTORIES)
    return Reference.from_factory(f"factories_of_user:{factory}", **options)


@pytest.mark.parametrize(
    ("factory", "name"), [("unseeded", "weight"), ("by_numpy", "weight"), ("buffer", "noise")]
)
def test_random_weights_are_refused(folder: Path, factory: str, name: str) -> None:
    with pytest.raises(ModelError, match=f"{name}.*--checkpoint"):
        reference(folder, factory)
    assert reference(folder, factory, untrained=True).model is not None


@pytest.mark.parametrize(
    "factory", ["seeded", "with_nan", "scratch", "kept", "lazy", "half", "empty"]
)
def test_reproducible_weights_are_accepted(folder: Path, factory: str) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert reference(folder, factory).is_reproducible
    if factory in ("lazy", "empty"):  # the others use the generator themselves
        assert torch.rand(1) == expected


def test_checkpoint_replaces_random_weights(folder: Path) -> None:
    save_checkpoint(nn.Linear(2, 2), folder / "weights.safetensors")
    (folder / "factories_of_user.py").write_text(FACTORIES)
    result = Reference.from_factory(
        "factories_of_user:unseeded", checkpoint=folder / "weights.safetensors"
    )
    assert result.is_reproducible


def test_large_model_is_built_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gate.model.loading._MAX_REBUILT_BYTES", 16)
    assert not reference(folder, "unseeded").is_reproducible

"""The source files of a model are recorded, and changes are detected."""

from __future__ import annotations

import importlib
import os
import py_compile
import shutil
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from gate.errors import EvidenceError
from gate.export.export_warnings import captured
from gate.model.loading import build_model, collect_code, modules_of
from gate.model.source_code import changed_files, imported_names, verify_unchanged
from gate.records.evidence import ModelCode

FILES = {
    "mine_/__init__.py": "",
    "mine_/models.py": """
        import json
        import torch
        from torch import nn
        from . import heads
        from mine_.parts.blocks import Block

        def build():
            from mine_ import late
            return nn.Sequential(Block(), heads.Head())
    """,
    "mine_/heads.py": """
        from torch import nn
        from .scale import FACTOR

        class Head(nn.Linear):
            def __init__(self):
                super().__init__(4, 2)
    """,
    "mine_/late.py": "import numpy\n",
    "mine_/unused.py": "raise RuntimeError\n",
    "mine_/parts/blocks.py": """
        from torch import nn
        from .. import scale

        class Block(nn.Module):
            def forward(self, x):
                return x.relu() * scale.FACTOR
    """,
    "mine_/scale.py": "FACTOR = 2.0\n",
}  # `mine_/parts` has no __init__.py
OWN_MODULES = {
    "mine_",
    "mine_.models",
    "mine_.heads",
    "mine_.late",
    "mine_.parts.blocks",
    "mine_.scale",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    write(FILES)
    yield tmp_path
    forget("mine_", "lone_", "zipped_", "byte_")


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.splitlines()
        indent = min((len(n) - len(n.lstrip()) for n in lines if n.strip()), default=0)
        path.write_text("\n".join(line[indent:] for line in lines) + "\n")


def forget(*tops: str) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in tops]:
        del sys.modules[name]
    importlib.invalidate_caches()


def code() -> ModelCode:
    return collect_code(build_model("mine_.models:build"), factory="mine_.models:build")


def edit(name: str, before: str, after: str) -> None:
    path = Path(name)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


def test_own_source_files_are_collected(project: Path) -> None:
    result = code()
    assert set(result.files) == OWN_MODULES
    assert set(result.packages) == {"torch", "numpy"}
    assert result.packages["torch"] == importlib.metadata.version("torch")
    assert result.unread == {}


@pytest.mark.proof
def test_digest_is_the_same_in_another_folder_and_process(project: Path, tmp_path: Path) -> None:
    second = tmp_path / "other place"
    shutil.copytree(project / "mine_", second / "mine_")
    program = (
        "from gate.model.loading import collect_code as code_of\nfrom gate.model.loading import build_model\n"
        "print(code_of(build_model('mine_.models:build'), factory='mine_.models:build').digest())"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=second, env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert completed.stdout.strip() == str(code().digest())


@pytest.mark.parametrize(
    ("file", "before", "after", "told"),
    [
        ("mine_/parts/blocks.py", "relu", "sigmoid", "mine_.parts.blocks"),
        ("mine_/scale.py", "2.0", "3.0", "mine_.scale"),
        ("mine_/late.py", "numpy", "torch", "mine_.late"),
        ("mine_/__init__.py", "\n", "import json\n", "mine_"),
    ],
)
def test_edit_changes_the_digest(project, file, before, after, told) -> None:
    old = code()
    assert changed_files(old) == ()
    edit(file, before, after)
    assert changed_files(old) == (told,)
    with pytest.raises(EvidenceError, match=rf"changed while it was measured: {told}\."):
        verify_unchanged(old)
    forget("mine_")
    assert changed_files(old) == (told,)  # nothing is imported
    assert "mine_" not in sys.modules
    assert code().changes_since(old)[0] == told


def test_new_import_and_removed_file(project: Path) -> None:
    old = code()
    edit("mine_/scale.py", "FACTOR", "import mine_.more\nFACTOR")
    Path("mine_/more.py").write_text("")
    forget("mine_")
    assert code().changes_since(old) == ("mine_.more (new)", "mine_.scale")
    Path("mine_/late.py").unlink()
    forget("mine_")
    assert changed_files(old) == ("mine_.scale",)
    assert changed_files(old, gone=True) == ("mine_.late", "mine_.scale")


def test_no_change_is_reported_without_sources(project, tmp_path, monkeypatch) -> None:
    old = code()
    forget("mine_")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    assert changed_files(old) == ()


def test_loaded_code_differing_from_its_file_is_reported(project: Path) -> None:
    build_model("mine_.models:build")
    edit("mine_/parts/blocks.py", "relu", "sigmoid")
    result = code()
    assert "mine_.parts.blocks" not in result.files
    assert "restart Python" in result.unread["mine_.parts.blocks"]
    assert "mine_.scale" in result.files


def test_torch_model_has_only_packages() -> None:
    result = collect_code(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), factory="torch.nn:Sequential")
    assert (result.files, set(result.packages), result.unread) == ({}, {"torch"}, {})


@pytest.mark.further
def test_distribution_name_differs_from_module_name(project: Path) -> None:
    write({"lone_.py": "from torch import nn\nimport PIL.Image, yaml_that_is_not_there\n"})
    result = collect_code(nn.ReLU(), factory="lone_:build")
    assert set(result.files) == {"lone_"}
    assert {name.lower() for name in result.packages} == {"torch", "pillow"}


def test_single_file_in_site_packages_is_user_code(project: Path, monkeypatch) -> None:
    write({"site-packages/lone_.py": "FACTOR = 1\n"})
    monkeypatch.setattr(sys, "path", [str(project / "site-packages"), *sys.path])
    assert set(collect_code(nn.ReLU(), factory="lone_:build").files) == {"lone_"}


@pytest.mark.parametrize(("name", "metadata", "record", "is_package"), [
    ("targeted_", "METADATA", "dist-info/RECORD", True),  # pip install --target
    ("inplace_", "PKG-INFO", "egg-info/SOURCES.txt", False),  # a project installed in place
])  # fmt: skip
def test_package_in_a_target_folder_has_its_version(
    project: Path, monkeypatch, name, metadata, record, is_package
) -> None:
    folder = f"vendor/{name}-1.5.{record.partition('/')[0]}"
    write({f"vendor/{name}.py": "FACTOR = 1\n",
           f"{folder}/{metadata}": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n",
           f"{folder}/{record.partition('/')[2]}": f"{name}.py,,\n"})  # fmt: skip
    monkeypatch.setattr(sys, "path", [str(project / "vendor"), *sys.path])
    result = collect_code(nn.ReLU(), factory=f"{name}:build")
    assert result.packages.get(name) == ("1.5" if is_package else None)
    assert set(result.files) == (set() if is_package else {name})


def test_chain_of_a_release_is_included(project: Path) -> None:
    (project / "between_.py").write_text("def run(parts, batch): return parts['a'](batch['input'])")
    importlib.invalidate_caches()
    assert set(collect_code(nn.ReLU(), chain="between_:run").files) == {"between_"}


def test_functions_attached_to_modules_are_included(project: Path) -> None:
    write({
        "lone_.py": "def scaled(module, inputs, output):\n    return output * 2\n"
                    "def outer(inner):\n    def hook(*a):\n        return inner(*a)\n    return hook\n"
    })  # fmt: skip
    import lone_

    for hang in (
        lambda m: m.register_forward_hook(lone_.scaled),
        lambda m: m.register_forward_hook(partial(lone_.scaled)),
        lambda m: setattr(m, "forward", partial(lone_.scaled, None, None)),
        lambda m: m.register_forward_pre_hook(lone_.outer(torch.relu)),
    ):
        model = nn.Sequential(nn.Linear(2, 2))
        hang(model[0])
        assert set(collect_code(model).files) == {"lone_"}


# --- Unreadable code is reported ------------------------------------------------------------------


def create_instance(name: str) -> nn.Module:
    return type("Net", (nn.Module,), {"__module__": name})()


def test_interactively_defined_class() -> None:
    assert "typed in" in collect_code(create_instance("__main__")).unread["__main__"]


def test_module_created_at_runtime(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lone_", types.ModuleType("lone_"))
    assert "no source file" in collect_code(create_instance("lone_")).unread["lone_"]
    assert "no source file" in collect_code(create_instance("never_was")).unread["never_was"]


def test_bytecode_without_source_is_unread(project: Path) -> None:
    write({"byte_.py": "X = 1\n"})
    py_compile.compile("byte_.py", cfile="byte_.pyc")
    Path("byte_.py").unlink()
    import byte_  # noqa: F401

    assert "bytecode" in collect_code(create_instance("byte_")).unread["byte_"]


def test_extension_module_is_unread(project: Path) -> None:
    import _ctypes_test as extension

    shutil.copy(extension.__file__, Path("lone_" + Path(extension.__file__).name[12:]))
    result = collect_code(nn.ReLU(), factory="lone_:build")
    assert "extension module" in result.unread["lone_"]


def test_deleted_file_is_unread(project: Path) -> None:
    write({"lone_.py": "X = 1\n"})
    import lone_  # noqa: F401

    Path("lone_.py").unlink()
    assert "not there" in collect_code(create_instance("lone_")).unread["lone_"]


def test_torchscript_and_generated_code_are_unread() -> None:
    plain = nn.Sequential(nn.ReLU())
    with captured():
        scripted = collect_code(nn.Sequential(torch.jit.script(plain)))
    assert any("TorchScript" in why for why in scripted.unread.values())
    assert any("torch.fx" in why for why in collect_code(fx.symbolic_trace(plain)).unread.values())


def test_zip_archive_is_read(project: Path, monkeypatch) -> None:
    with zipfile.ZipFile("library.zip", "w") as archive:
        archive.writestr("zipped_.py", "X = 1\n")
    monkeypatch.setattr(sys, "path", [str(project / "library.zip"), *sys.path])
    import zipped_  # noqa: F401

    result = modules_of(create_instance("zipped_"))
    assert set(result.files) == {"zipped_"}
    assert result.paths == {}


@pytest.mark.parametrize(
    ("source", "package", "names"),
    [
        ("import a.b as c", "p", {"a", "a.b"}),
        ("from a import b", "p", {"a", "a.b"}),
        ("from . import b", "p.q", {"p", "p.q", "p.q.b"}),
        ("from ..r import b", "p.q", {"p", "p.r", "p.r.b"}),
        ("from ... import b", "p", set()),
        ("def f():\n    import late", "", {"late"}),
        ("this is no Python", "", set()),
        ("\0", "", set()),
    ],
)
def test_imported_names_of_a_source(source: str, package: str, names: set[str]) -> None:
    assert set(imported_names(source.encode(), package)) == names

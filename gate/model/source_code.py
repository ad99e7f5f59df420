"""Source files of modules and their digests. Must not import torch."""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from gate.errors import EvidenceError
from gate.records.evidence import ModelCode
from gate.storage.digest import Digest


def differs(name: str, source: bytes) -> bool:
    """Return whether a function or method of the loaded module `name` is not in `source`.

    False for other loaders than Python's own (of test runners, of type checkers), because they
    rewrite the code. Changed constants of the module can't be detected.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is None or spec is None or type(spec.loader) is not _LOADER:
        return False
    try:
        compiled = set(_nested_code(compile(source, "", "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):
        return True
    return any(code not in compiled for code in _loaded_code(module, str(spec.origin)))


_LOADER = importlib.machinery.SourceFileLoader


def _nested_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_code(constant)


def _loaded_code(module: ModuleType, file: str) -> Iterator[CodeType]:
    """Yield the code of the module's functions and methods that are defined in this file."""
    for value in list(vars(module).values()):
        members = [value]
        if isinstance(value, type) and value.__module__ == module.__name__:
            members += vars(value).values()
        for member in members:
            if isinstance(member, property):
                member = member.fget  # noqa: PLW2901
            # No getattr, because it would start CUDA for attributes of torch.backends.cuda.
            bound = isinstance(member, classmethod | staticmethod | MethodType)
            function = member.__func__ if bound else member
            if isinstance(function, FunctionType) and function.__code__.co_filename == file:
                yield function.__code__


_INSTALLED = frozenset({"site-packages", "dist-packages"})

_COMPILED = tuple(importlib.machinery.EXTENSION_SUFFIXES)

_SCRIPTS = ("__main__", "__mp_main__")

_GATE = "gate"
"""This package, which is not a part of the model."""


@dataclass
class SourceFiles:
    """The source files of modules and of all their imports, grouped as in `ModelCode`.

    Nothing is imported: modules that are not loaded are searched on the path.
    """

    files: dict[str, Digest] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    """Paths of the files by name; files in an archive have none."""
    packages: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    _visited: set[str] = field(default_factory=set)

    def add(self, name: str, *, needed: bool = False) -> None:
        """Add a module, its parent packages, and its imports.

        A name that is not a module is skipped; if it is `needed`, it is recorded as unread.
        """
        parts = name.split(".")
        pending = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if needed and _find_spec(name) is None:
            self.unread[name] = _no_source_reason(name)
            return
        while pending:
            module = pending.pop()
            if module not in self._visited and module.partition(".")[0] != _GATE:
                self._visited.add(module)
                pending += self._collect(module)

    def code(self) -> ModelCode:
        """Return the record, in a fixed order."""
        return ModelCode(
            files=dict(sorted(self.files.items())),
            packages=dict(sorted(self.packages.items())),
            unread=dict(sorted(self.unread.items())),
        )

    def _collect(self, name: str) -> Iterable[str]:
        """Add the source file of a module; return the names that it imports."""
        spec = _find_spec(name)
        if spec is None or not spec.has_location or spec.origin is None:
            return ()  # a built-in, a folder without code, or no module
        path = Path(spec.origin)
        owners = _find_distributions(name.partition(".")[0]) if _is_installed(path) else {}
        if owners or any(map(path.is_relative_to, _standard_library_paths())):
            self.packages.update(owners)
            return ()
        source = _read_source(spec)
        if isinstance(source, str):
            self.unread[name] = source
            return ()
        if differs(name, source):
            self.unread[name] = "what is loaded is not what its file says now: restart Python"
        else:
            self.files[name] = Digest.from_bytes(source)
        if path.is_file():
            self.paths[name] = path
        package = spec.submodule_search_locations is not None
        return imported_names(source, name if package else name.rpartition(".")[0])


@functools.lru_cache(maxsize=1024)
def imported_names(source: bytes, package: str) -> tuple[str, ...]:
    """Return the names that a source in `package` imports at any level, with parent packages.

    For `from a import b` these are `a` and `a.b`, which need not be a module.
    """
    try:
        return tuple(_import_names(ast.parse(source), package))
    except (SyntaxError, ValueError):
        return ()


def _import_names(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        bases: list[str] = []
        if isinstance(node, ast.Import):
            bases = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute_name(node, package)
            bases = [base, *(f"{base}.{alias.name}" for alias in node.names)] if base else []
        for base in bases:
            parts = base.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def changed_files(code: ModelCode, *, gone: bool = False) -> tuple[str, ...]:
    """Return the modules whose source files differ from `code`.

    gone: also return those that are not found. Nothing is imported: modules that are not loaded are
    searched in the current folder first, then on the path.
    """
    digests = {name: _digest_now(name) for name in code.files}
    return tuple(
        name
        for name, digest in sorted(digests.items())
        if (gone if digest is None else digest != code.files[name])
    )


def verify_unchanged(code: ModelCode) -> None:
    """Raise EvidenceError if a source file is not (any more) what was imported."""
    changed = changed_files(code, gone=True)
    if changed:
        raise EvidenceError(
            f"the model's code changed while it was measured: {', '.join(changed)}. What was "
            "measured is neither the old nor the new code for sure: measure again."
        )


def _digest_now(name: str) -> Digest | None:
    spec = _find_spec(name)
    source = None if spec is None or not spec.has_location else _read_source(spec)
    return Digest.from_bytes(source) if isinstance(source, bytes) else None


def _find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module, loaded or not; None if there is none."""
    if name in sys.modules:
        # A script has the spec of another name, or none.
        spec = None if name in _SCRIPTS else getattr(sys.modules[name], "__spec__", None)
        return spec if isinstance(spec, importlib.machinery.ModuleSpec) else None
    head, _, tail = name.rpartition(".")
    if not head:
        return _top_level(name)
    parent = _find_spec(head)
    locations = [] if parent is None else list(parent.submodule_search_locations or ())
    try:
        return importlib.machinery.PathFinder.find_spec(name, locations)
    except KeyError:  # a folder without __init__.py in one that is not loaded
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(Path(location, tail)) for location in locations]
        return spec


def _top_level(name: str) -> importlib.machinery.ModuleSpec | None:
    local = importlib.machinery.PathFinder.find_spec(name, [str(Path.cwd())])
    if local is not None and local.has_location:
        return local
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, None)
        if isinstance(spec, importlib.machinery.ModuleSpec):
            return spec
    return None


def _read_source(spec: importlib.machinery.ModuleSpec) -> bytes | str:
    """Return the bytes of the source file, or the reason why there are none."""
    origin = str(spec.origin)
    if origin.endswith(_COMPILED):
        return "it is compiled: an extension module"
    if origin.endswith(tuple(importlib.machinery.BYTECODE_SUFFIXES)):
        return "it is compiled: bytecode without its source"
    loader: Any = spec.loader
    try:
        if hasattr(loader, "get_data"):
            return bytes(loader.get_data(origin))
        return Path(origin).read_bytes()
    except (OSError, ValueError) as error:
        return f"its source is not there ({type(error).__name__})"


def _no_source_reason(name: str) -> str:
    if name in _SCRIPTS:
        return "it was typed in, or run as a script: put the model into a module"
    return "it has no source file: it was made while the program ran"


def _absolute_name(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_installed(path: Path) -> bool:
    """Return whether a file is in a folder into which pip installs packages."""
    if _INSTALLED.intersection(path.parts):
        return True
    return any(path.is_relative_to(entry) and _has_records(entry) for entry in sys.path)


@functools.cache
def _has_records(folder: str) -> bool:
    """Return whether pip installed packages into a folder, such as that of `--target`. A project
    that is installed in place has its records elsewhere."""
    return any(Path(folder).glob("*.dist-info/RECORD"))


@functools.cache
def _standard_library_paths() -> tuple[str, ...]:
    return tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


@functools.cache
def _find_distributions(top: str) -> Mapping[str, str]:
    """Return the distributions that install a top-level module, with their versions; often one."""
    try:
        distribution = metadata.distribution(top)
    except (metadata.PackageNotFoundError, ValueError):
        names = sorted(set(_packages_by_module().get(top, ())))
        return {name: metadata.version(name) for name in names}
    return {distribution.metadata["Name"]: distribution.version}


@functools.cache
def _packages_by_module() -> dict[str, list[str]]:
    """Return the distributions by top-level module; takes half a second."""
    return dict(metadata.packages_distributions())


def source_location(file: str, line: int) -> str:
    """Return `torchvision/models/resnet.py:12`: the file below the import path."""
    return f"{below_import_path(file)}:{line}"


def below_import_path(filename: str) -> str:
    """Return the path of a source file below the folder that it is imported from, or its name."""
    file = Path(filename)
    for root in sorted(_import_roots(), key=lambda root: len(root.parts), reverse=True):
        if file.is_relative_to(root):
            return file.relative_to(root).as_posix()
    return file.name


def file_below(folder: Path, path: str) -> str:
    """Return the path of a source file relative to a folder: `src/mypackage/models.py`.

    path: that below the import path, which is returned for files outside of the folder, such as
    those of installed packages."""
    folder = folder.resolve()
    for root in _import_roots():
        file = root.resolve() / path
        if file.is_file() and file.is_relative_to(folder) and "site-packages" not in file.parts:
            return file.relative_to(folder).as_posix()
    return path


def _import_roots() -> list[Path]:
    return [Path(entry).absolute() for entry in ("", *sys.path) if Path(entry).is_dir()]


def module_source(model: Any, path: str) -> tuple[Path, int] | None:
    """Return file and line of the project's code that creates the module `path` of an nn.Module.

    It is the assignment in the nearest enclosing class that is defined below the current folder,
    else the first line of that class. None if there is no such class."""
    names = path.split(".") if path else []
    for depth in range(len(names), -1, -1):
        try:
            owner = model.get_submodule(".".join(names[:depth]))
            file = Path(inspect.getsourcefile(type(owner)) or "").resolve()
            lines, first = inspect.getsourcelines(type(owner))
        except (AttributeError, OSError, TypeError):  # no such module; no source
            continue
        project = Path.cwd().resolve()
        if not file.is_relative_to(project) or "site-packages" in file.parts:
            continue
        attribute = re.escape(names[depth]) if depth < len(names) else "(?!)"
        assignment = re.compile(rf"\bself\.{attribute}\b[^=]*=[^=]")
        offset = next((n for n, line in enumerate(lines) if assignment.search(line)), 0)
        return file.relative_to(project), first + offset
    return None

"""Parse `package.module:callable`, before torch is imported; pause garbage collection."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from gate.errors import ModelError


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the garbage collector in one of our processes, and freeze all objects afterwards.

    PyTorch's modules create a million permanent objects. Visiting them repeatedly takes a third of
    the import time.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            # Both together move all objects into the oldest generation without a collection.
            gc.freeze()
            gc.unfreeze()
            gc.enable()


def is_onnx_file(reference: str) -> bool:
    """Return True if a reference names an ONNX file instead of a factory."""
    return reference.lower().endswith(".onnx") and (
        ":" not in reference or Path(reference).is_file()
    )


_REGISTERED = re.compile(r"models:/([^/@]+)(?:@([^/@]+)|/([0-9]+))")


def parse_registered(reference: str) -> tuple[str, str | None, str | None] | None:
    """Return name, alias and number of `models:/NAME@ALIAS` or `models:/NAME/NUMBER`; alias or
    number is None. None for other references. Raises ModelError if the text is malformed."""
    if not reference.startswith("models:"):
        return None
    match = _REGISTERED.fullmatch(reference)
    if match is None:
        raise ModelError(
            f"not a registered model: {reference!r}. Expected models:/NAME@ALIAS or "
            "models:/NAME/VERSION, for example models:/digits@champion."
        )
    return match[1], match[2], match[3]


def parse_factory(factory: str, *, alternative: str = "") -> tuple[str, list[str]]:
    """Return module and attributes. Raises ModelError if the text is malformed.

    `alternative`: what the message names as also valid."""
    module_name, colon, attribute = factory.partition(":")
    path = attribute.split(".")
    names = [*module_name.split("."), *path]
    is_path = Path(module_name).suffix in (".py", ".ipynb") and Path(module_name).is_file()
    if not colon or is_path or not all(name.isidentifier() for name in names):
        module = module_name.removeprefix("./").removesuffix(".py").replace("/", ".")
        raise ModelError(
            f"not a factory: {factory!r}. Expected package.module:callable, "
            f"for example torchvision.models:resnet18{alternative}."
            + (f" Did you mean {module}:{attribute}?" if is_path and module != module_name else "")
            + (" gate check judges ONNX files." if is_onnx_file(factory) else "")
        )
    return module_name, path


def require_package(factory: str, *, alternative: str = "") -> None:
    """Raise ModelError if the text is malformed, or if its outermost package does not exist.

    Imports nothing: errors inside the package appear when the factory is called.
    """
    package = parse_factory(factory, alternative=alternative)[0].partition(".")[0]
    importlib.invalidate_caches()
    try:
        spec = package in sys.modules or importlib.util.find_spec(package)
    except (ImportError, ValueError):  # errors of other import finders are not decisive
        return
    if not spec and not PathFinder.find_spec(package, [str(Path.cwd())]):
        raise ModelError(no_module(package, purpose=f"the factory {factory}"))


def source_in_project(factory: str) -> Path | None:
    """Return the file or folder of a factory's outermost package relative to the current folder.

    None if the package is elsewhere or does not exist. Imports nothing. Raises ModelError if the
    text is malformed.
    """
    package, project = parse_factory(factory)[0].partition(".")[0], Path.cwd().resolve()
    importlib.invalidate_caches()
    spec = PathFinder.find_spec(package, [str(project), *sys.path])
    if spec is None:
        return None
    folders = spec.submodule_search_locations
    path = Path(next(iter(folders), "") if folders else spec.origin or "").resolve()
    is_inside = path.is_relative_to(project) and path != project
    return path.relative_to(project) if is_inside and "site-packages" not in path.parts else None


def no_module(name: str, *, purpose: str) -> str:
    """Return the message for a module that cannot be found."""
    return (
        f"no module named {name!r} for {purpose}. Looked in the current folder and the installed "
        "packages: check the spelling, or change the folder."
    )

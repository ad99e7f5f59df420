"""The name of a factory, `package.module:callable`: what is known before torch is there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from gate.errors import ModelError


def parse_factory(factory: str) -> tuple[str, list[str]]:
    """Module and attributes. Raises ModelError if the text is malformed."""
    module_name, colon, attribute = factory.partition(":")
    path = attribute.split(".")
    names = [*module_name.split("."), *path]
    if not colon or not all(name.isidentifier() for name in names):
        raise ModelError(
            f"not a factory: {factory!r}. Expected package.module:callable, "
            "for example torchvision.models:resnet18."
        )
    return module_name, path


def require_package(factory: str) -> None:
    """Raise ModelError if the text is malformed, or its outermost package is nowhere.

    Nothing is imported: what is inside the package shows when the factory is called.
    """
    package = parse_factory(factory)[0].partition(".")[0]
    importlib.invalidate_caches()
    try:
        found = package in sys.modules or importlib.util.find_spec(package)
    except (ImportError, ValueError):  # the finders of others, on whose word nothing is refused
        return
    if not found and not PathFinder.find_spec(package, [str(Path.cwd())]):
        raise ModelError(no_module(package, wanted=f"the factory {factory}"))


def no_module(name: str, *, wanted: str) -> str:
    """What is said of a module that is nowhere."""
    return (
        f"no module named {name!r} for {wanted}. Looked in the current folder and the installed "
        "packages: check the spelling, or change the folder."
    )

"""Getting the reference model: from a factory by name, from torchvision, from a checkpoint.

`load_checkpoint` and `save_checkpoint` live in `gate.model.checkpoint`, `torchvision_model` in
`gate.model.pretrained`; all loading is named here, so that callers need one import.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch import nn

from gate.errors import ModelError
from gate.model.checkpoint import load_checkpoint, save_checkpoint
from gate.model.factory import no_module, parse_factory
from gate.model.pretrained import torchvision_model

__all__ = ["build_model", "load_checkpoint", "save_checkpoint", "torchvision_model"]


_EXPECTED = "a callable without arguments that returns an nn.Module"


def build_model(factory: str) -> nn.Module:
    """Import and call `package.module:callable` (no arguments); return its `nn.Module`.

    Raises ModelError if the text is malformed, or if anything on the way to a module fails.
    """
    model = call_factory(factory, expected=_EXPECTED)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{factory} returned {_describe(model)}, expected an nn.Module. "
            "Return the model itself, not a class, a state dict or a tuple."
        )
    return model


def call_factory(factory: str, *, expected: str) -> object:
    """Import and call `package.module:callable`. `expected`: what it should be, for messages.

    The current folder is put first on `sys.path` and stays there, as with `python -m`: what comes
    back may import more of its package later. A module that changes the folder is brought back, or
    relative paths of the caller would name other files from then on. Raises ModelError if the text
    is malformed, or if anything on the way fails.
    """
    module_name, attribute = parse_factory(factory)
    with contextlib.chdir(Path.cwd()):
        module = imported(module_name, wanted=f"the factory {factory}")
        target = _attribute(module, attribute, factory, expected=expected)
        try:
            return target()
        except (Exception, SystemExit) as error:
            raise ModelError(
                f"{factory} raised {type(error).__name__}: {error}. Expected {expected}; wrap one "
                "that needs arguments in a function."
            ) from error


def imported(module_name: str, *, wanted: str) -> ModuleType:
    """Import a module of the user's, from the current folder too. `wanted` says what for.

    Raises ModelError if it is missing, or if importing it fails.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ModelError(no_module(missing, wanted=wanted)) from error
        raise ModelError(
            f"importing {module_name} needs the module {missing!r}, which is not installed. "
            "Install it into this environment."
        ) from error
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"importing {module_name} raised {type(error).__name__}: {error}. "
            "Make the module importable: python -c 'import "
            f"{module_name}' must succeed."
        ) from error


def _attribute(
    module: ModuleType, path: list[str], factory: str, *, expected: str
) -> Callable[[], object]:
    target: object = module
    for name in path:
        if not hasattr(target, name):
            raise ModelError(
                f"{module.__name__} has no {'.'.join(path)!r} for the factory {factory}. "
                f"It has: {_offer(target)}."
            )
        target = getattr(target, name)
    if isinstance(target, nn.Module):
        raise ModelError(
            f"{factory} is a model already, expected a callable that builds one. "
            "Name a function that returns it."
        )
    if not callable(target):
        raise ModelError(f"{factory} is {_describe(target)}, expected {expected}.")
    return target


def _offer(target: object) -> str:
    """Some public callables, so that a misspelt name is seen at once."""
    names = [
        name for name, value in vars(target).items() if not name.startswith("_") and callable(value)
    ]
    return ", ".join(sorted(names)[:8]) or "nothing that can be called"


def _describe(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"

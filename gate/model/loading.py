"""Build the model from a factory or torchvision; collect its code."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
from torch import fx, nn

from gate.errors import CheckpointError, ModelError, describe_error, first_line
from gate.model.factory import no_module, parse_factory
from gate.model.source_code import SourceFiles
from gate.records.evidence import ModelCode


def collect_code(model: nn.Module, *, factory: str = "", chain: str = "") -> ModelCode:
    """Return the source files that define `model`, and the packages that they use.

    Files of the modules of the factory and of a release's chain, of the classes of all submodules,
    of attached functions (hooks, a `forward` of the instance, their closures), and of everything
    that these files import, transitively, outside of Python and the installed packages. Other files
    that a factory reads (a YAML file) are not included. Does not run or change the model.
    """
    return modules_of(model, factory=factory, chain=chain).code()


def modules_of(model: nn.Module, *, factory: str = "", chain: str = "") -> SourceFiles:
    """Return the source files with their paths."""
    modules = SourceFiles()
    for reference in filter(None, (factory, chain)):
        modules.add(reference.partition(":")[0])
    for name in sorted(set(_defining_modules(model))):
        modules.add(name, needed=True)
    for path, module in model.named_modules():
        reason = _missing_source_reason(module)
        if reason is not None:
            modules.unread[f"{type(model).__name__}.{path}".rstrip(".")] = reason
    return modules


def _defining_modules(model: nn.Module) -> Iterator[str]:
    """Yield the names of Python modules that define a class or function of the model."""
    for kind in {type(module) for module in model.modules()}:
        yield from (base.__module__ for base in kind.__mro__)
    for module in model.modules():
        for value in vars(module).values():
            yield from _modules_of_functions(value, set())


def _modules_of_functions(value: Any, visited: set[int]) -> Iterator[str]:
    """Yield the modules of a function or of a dict of functions, including those in closures."""
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, functools.partial):
        yield from _modules_of_functions(value.func, visited)
    elif inspect.ismethod(value):
        yield from _modules_of_functions(value.__func__, visited)
    elif isinstance(value, FunctionType):
        yield value.__module__ or "__main__"
        for cell in value.__closure__ or ():
            try:
                yield from _modules_of_functions(cell.cell_contents, visited)
            except ValueError:  # an empty cell of a closure
                continue
    elif isinstance(value, dict):
        for item in value.values():
            if isinstance(item, FunctionType | functools.partial) or inspect.ismethod(item):
                yield from _modules_of_functions(item, visited)


def _missing_source_reason(module: nn.Module) -> str | None:
    """Return why the module's forward has no source file, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is TorchScript: its code came with the weights"
    if isinstance(module, fx.GraphModule):
        return "torch.fx generated its code"
    return None


_EXPECTED = "a callable without arguments that returns an nn.Module"


def build_model(factory: str) -> nn.Module:
    """Import and call `package.module:callable` without arguments; return its `nn.Module`.

    Raises ModelError if the text is malformed or the import or call fails.
    """
    model = call_factory(factory, expected=_EXPECTED)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{factory} returned {_describe(model)}, expected an nn.Module. "
            "Return the model itself, not a class, a state dict or a tuple."
        )
    return model


_MAX_REBUILT_BYTES = 2e9
"""Bytes of weights above which a model is not built twice."""


def require_same_weights(factory: str, model: nn.Module) -> bool:
    """Build the model again under another seed and compare parameters and persistent buffers.

    Returns False if nothing was compared: `model` has more than 2 GB, or can't be built twice. The
    random states do not change. Raises ModelError if the weights differ.
    """
    tensors = model.state_dict()
    if sum(t.nbytes for t in tensors.values() if isinstance(t, torch.Tensor)) > _MAX_REBUILT_BYTES:
        return False
    with seeded(_SEED):
        try:
            rebuilt = build_model(factory).state_dict()
        except ModelError:  # some factories can be called only once
            return False
    for name, tensor in tensors.items():
        if _differs(tensor, rebuilt.get(name)):
            raise ModelError(
                f"{factory} returns other weights with each call ({name} differs), "
                "so no file can match it. Pass --checkpoint FILE, or set a seed in the factory."
            )
    return True


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and PyTorch inside the block, then restore them."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


_SEED = 20_240_229
"""A seed that users are unlikely to choose."""


def _differs(tensor: object, rebuilt: object) -> bool:
    """Return True if two tensors differ, False if the bytes of one are not available."""
    tensors = [t for t in (tensor, rebuilt) if isinstance(t, torch.Tensor)]
    if len(tensors) < 2 or any(map(nn.parameter.is_lazy, tensors)):
        return False
    if tensors[0].dtype != tensors[1].dtype or tensors[0].shape != tensors[1].shape:
        return True
    if not all(t.layout is torch.strided and t.device.type == "cpu" for t in tensors):
        return False
    if any(t.is_quantized for t in tensors):
        return False
    first, second = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in tensors)
    return not torch.equal(first, second)


def call_factory(factory: str, *, expected: str) -> object:
    """Import and call `package.module:callable`. `expected`: description of it for messages.

    Like `python -m`, puts the current folder first on `sys.path` permanently, because the model may
    import more of its package later. If a module changes the current folder, it is restored, so
    that relative paths stay valid. Raises ModelError if the text is malformed, or the import or
    call fails.
    """
    module_name, attribute = parse_factory(factory)
    with contextlib.chdir(Path.cwd()):
        module = import_user_module(module_name, purpose=f"the factory {factory}")
        target = _resolve_attribute(module, attribute, factory, expected=expected)
        try:
            return target()
        except (Exception, SystemExit) as error:
            is_inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            remedy = (
                "Correct its code."
                if is_inside
                else f"Expected {expected}; wrap one that needs arguments in a function."
            )
            raise ModelError(f"{factory} raised {describe_error(error)}. {remedy}") from error


def import_user_module(module_name: str, *, purpose: str) -> ModuleType:
    """Import a module of the user, also from the current folder. purpose: text for messages.

    Raises ModelError if it is missing, or if importing it fails.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ModelError(no_module(missing, purpose=purpose)) from error
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


def _resolve_attribute(
    module: ModuleType, path: list[str], factory: str, *, expected: str
) -> Callable[[], object]:
    target: object = module
    for name in path:
        if not hasattr(target, name):
            raise ModelError(
                f"{module.__name__} has no {'.'.join(path)!r} for the factory {factory}. "
                f"It has: {_public_callables(target)}."
            )
        target = getattr(target, name)
    if isinstance(target, nn.Module):
        raise ModelError(
            f"{factory} is already a model, expected a callable that builds one. "
            "Pass a function that returns it."
        )
    if not callable(target):
        raise ModelError(f"{factory} is {_describe(target)}, expected {expected}.")
    return target


def _public_callables(target: object) -> str:
    """Return some public callables, which helps to find a misspelled name."""
    names = [
        name for name, value in vars(target).items() if not name.startswith("_") and callable(value)
    ]
    return ", ".join(sorted(names)[:8]) or "no callables"


def _describe(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.")


def torchvision_model(name: str, *, weights: str | None, num_classes: int | None) -> nn.Module:
    """Build the torchvision model `name`, with `weights` (`IMAGENET1K_V1`, `DEFAULT`) or none.

    Weights come from the torch hub cache or are downloaded into it. A file with a hash in its name
    must have that hash, and may hold tensors only. With weights and another `num_classes`, modules
    whose size depends on it (the heads) are new and random: seed before the call. Raises ModelError
    for unknown names or numbers, CheckpointError if the weights are unavailable or unsafe.
    """
    import torchvision.models as zoo

    if name not in zoo.list_models():
        raise ModelError(f"torchvision has no model {name!r}.{_suggest(name, zoo.list_models())}")
    if num_classes is not None and num_classes < 1:
        raise ModelError(f"num_classes is {num_classes}, expected at least 1.")
    if weights is None:
        return _build(name, num_classes)
    entry = _weights_entry(name, weights)
    _fetch_safely(entry)
    model = _get_model(name, weights=entry)
    if num_classes is not None and num_classes != len(entry.meta.get("categories", ())):
        _replace_heads(model, _build(name, num_classes), name)
    return model


def _build(name: str, num_classes: int | None) -> nn.Module:
    """Build an untrained model. Detection and segmentation models would download a backbone."""
    import torchvision.models as zoo

    arguments: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    parameters = inspect.signature(zoo.get_model_builder(name)).parameters
    if "weights_backbone" in parameters:
        arguments["weights_backbone"] = None
    if name in {"googlenet", "inception_v3"}:
        # The default (True) warns that it will change.
        arguments["init_weights"] = True
    return _get_model(name, weights=None, **arguments)


def _get_model(name: str, **arguments: Any) -> nn.Module:
    import torchvision.models as zoo

    try:
        model: nn.Module = zoo.get_model(name, **arguments)
    except Exception as error:
        raise ModelError(
            f"torchvision cannot build {name}: {type(error).__name__}: {error}. "
            "Check model.name, model.weights and model.num_classes."
        ) from error
    return model


def _weights_entry(name: str, weights: str) -> Any:
    import torchvision.models as zoo

    entries = zoo.get_model_weights(name)
    short = weights.removeprefix(f"{entries.__name__}.")
    if short not in entries.__members__:
        raise ModelError(
            f"{name} has no weights {weights!r}, it has: {', '.join(entries.__members__)}."
        )
    return entries[short]


def _fetch_safely(entry: Any) -> None:
    """Put the weights into the cache; verify that the file is complete and holds only tensors.

    torchvision unpickles without `weights_only` and verifies the hash only at the download.
    """
    file_name = Path(urlparse(entry.url).path).name
    cached = Path(torch.hub.get_dir()) / "checkpoints" / file_name
    remedy = (
        f"Place the file {file_name} in {cached.parent} (TORCH_HOME moves it), "
        "or set a local checkpoint instead (model.checkpoint)."
    )
    if cached.exists():
        _check_hash(cached, remedy)
    try:
        # torch announces the download on stdout, which may be parsed by a program.
        with contextlib.redirect_stdout(sys.stderr):
            entry.get_state_dict(
                progress=sys.stderr.isatty(), check_hash=True, map_location="cpu", weights_only=True
            )
    except Exception as error:
        verb = "read" if cached.exists() else "download"
        raise CheckpointError(
            f"cannot {verb} the weights {entry} from {cached if verb == 'read' else entry.url}: "
            f"{type(error).__name__}: {first_line(error).rstrip('.')}. {remedy}"
        ) from error


def _check_hash(cached: Path, remedy: str) -> None:
    expected = _HASH_IN_NAME.search(cached.name)
    if expected is None:
        return
    with cached.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if not actual.startswith(expected.group(1)):
        raise CheckpointError(
            f"{cached} has SHA-256 {actual[:12]}…, its name promises {expected.group(1)}…: "
            f"it is incomplete or was changed. Delete it. {remedy}"
        )


def _replace_heads(model: nn.Module, fresh: nn.Module, name: str) -> None:
    """Copy modules from `fresh` whose parameters differ in shape from those of `model`."""
    expected = fresh.state_dict()
    differing = [
        key for key, value in model.state_dict().items()
        if key not in expected or expected[key].shape != value.shape
    ]  # fmt: skip
    owners = {key.rpartition(".")[0] for key in differing}
    if "" in owners or any(key not in expected for key in differing):
        raise ModelError(
            f"the number of classes of {name} with weights can't change: its structure depends "
            "on it. Omit num_classes, or write a factory that builds the model."
        )
    for owner in sorted(owners):
        model.set_submodule(owner, fresh.get_submodule(owner))


def _suggest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=3)
    return f" Did you mean {' or '.join(near)}?" if near else " See torchvision.models.list_models."

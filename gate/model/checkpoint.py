"""Load and save weights without executing code."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gate.errors import CheckpointError, first_line
from gate.storage import files
from gate.storage.digest import Digest
from gate.storage.safe_text import list_first
from gate.storage.untrusted_files import detect_pointer_file

State = dict[str, Any]

_TORCH_SUFFIXES = (".pt", ".pth")

_NESTED_UNDER = ("state_dict", "model", "model_state_dict")

_EXTRA_STATE = "_extra_state"

_FORBIDDEN = re.compile(r"GLOBAL ([\w.]+)")

_DETAIL = re.compile(r"WeightsUnpickler error: (.*)")


def load_checkpoint(model: nn.Module, path: Path) -> Digest:
    """Load `path` (`.pt`, `.pth` or `.safetensors`) into `model`, strictly; return its digest.

    A `.pt` file is a state dict, or a dict with one under `state_dict`, `model` or
    `model_state_dict`. It is read with `weights_only`, so none of its code runs. The prefixes
    `module.` of DataParallel and `_orig_mod.` of torch.compile are removed. Raises CheckpointError
    if the file is missing, damaged, unsafe, from another architecture, or contains NaN or infinity.
    `model` is unchanged then.
    """
    if (pointer := detect_pointer_file(path)) is not None:
        raise CheckpointError(pointer)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise CheckpointError(f"the checkpoint {path} {problem}. Pass a .pt or .safetensors file.")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}. Check permissions."
        ) from error
    state = _without_prefix(_read(data, path), model)
    _fill_tied(state, model)
    _check_finite(state, model, path)
    trial = copy.deepcopy(model)  # load_state_dict copies matching entries before it raises
    try:
        trial.load_state_dict(state, strict=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of this {type(model).__name__}: "
            f"{_difference(state, model) or first_line(error).rstrip('.')}. "
            "Check the factory, the number of classes and the file."
        ) from error
    model.load_state_dict(state, strict=True)
    return Digest.from_bytes(data)  # digest of the loaded bytes, even if the file has changed since


def save_checkpoint(model: nn.Module, path: Path) -> Digest:
    """Write the weights of `model` to `path` as safetensors, atomically; return the digest.

    The same weights give the same bytes. Tensors that share memory are written under each name, so
    that the file can be loaded strictly. Raises CheckpointError for entries that are not tensors or
    not finite, StorageError if the file can't be written.
    """
    from safetensors.torch import save

    if path.suffix != ".safetensors":
        raise CheckpointError(f"cannot save {path}: the name must end in .safetensors.")
    state = model.state_dict()
    invalid = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
    if invalid:
        raise CheckpointError(
            f"{invalid[0]} is not a tensor and can't be saved as safetensors. "
            "Keep such state outside of the model's state dict."
        )
    _check_finite(state, model, path)
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}
    data = save(tensors, metadata={"format": "pt"})
    files.write_bytes(path, data)
    return Digest.from_bytes(data)


def _read(data: bytes, path: Path) -> State:
    if path.suffix == ".safetensors":
        return _read_safetensors(data, path)
    if path.suffix in _TORCH_SUFFIXES:
        return _state_dict(_read_torch(data, path), path)
    raise CheckpointError(
        f"{path} ends in {path.suffix!r}, expected .pt, .pth or .safetensors. "
        "Convert it, or rename it if it is one of them."
    )


def _read_safetensors(data: bytes, path: Path) -> State:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(data))
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file: {first_line(error).rstrip('.')}. "
            "Copy or download it again."
        ) from error


def _read_torch(data: bytes, path: Path) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickle protocols; real problems raise
            return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        unsafe = _FORBIDDEN.search(str(error))
        if unsafe is None:
            raise _damaged_error(path, error) from error
        raise CheckpointError(
            f"{path} contains code that would run when it is loaded ({unsafe.group(1)}). "
            "The gate did not run it. Save model.state_dict(), preferably as .safetensors."
        ) from error
    except Exception as error:  # torch raises almost any exception for invalid checkpoints
        raise _damaged_error(path, error) from error


def _damaged_error(path: Path, error: Exception) -> CheckpointError:
    # torch's message recommends to disable the protection, so only its detail is shown.
    detail = _DETAIL.search(str(error))
    reason = detail.group(1).strip() if detail else ""
    if not isinstance(error, pickle.UnpicklingError):
        reason = first_line(error, empty="").rstrip(".")
    return CheckpointError(
        f"{path} is not a complete PyTorch checkpoint ({type(error).__name__}"
        f"{': ' if reason else ''}{reason}). Copy or download it again."
    )


def _state_dict(loaded: object, path: Path) -> State:
    if isinstance(loaded, Mapping):
        for name in _NESTED_UNDER:
            if isinstance(loaded.get(name), Mapping):
                loaded = loaded[name]
                break
    if not isinstance(loaded, Mapping) or not loaded:
        kind = "an empty dict" if isinstance(loaded, Mapping) else type(loaded).__name__
        raise CheckpointError(
            f"{path} holds {kind}, expected a state dict of tensors. Save model.state_dict()."
        )
    for key, value in loaded.items():
        is_tensor = isinstance(value, torch.Tensor) or str(key).endswith(_EXTRA_STATE)
        if not isinstance(key, str) or not is_tensor:
            raise CheckpointError(
                f"{path}: the entry {key!r} is {type(value).__name__}, expected a tensor. "
                f"Save model.state_dict() alone, or under one of {', '.join(_NESTED_UNDER)}."
            )
    return dict(loaded)


def _without_prefix(state: State, model: nn.Module) -> State:
    expected, prefix, compiled = model.state_dict(), "module.", "_orig_mod."
    if not any(compiled in key for key in expected):  # also the prefix of a compiled submodule
        state = {key.replace(compiled, ""): value for key, value in state.items()}
    wrapped = all(key.startswith(prefix) for key in state)
    if not wrapped or any(key.startswith(prefix) for key in expected):
        return state
    return {key.removeprefix(prefix): value for key, value in state.items()}


def _fill_tied(state: State, model: nn.Module) -> None:
    """Restore the names that `safetensors.torch.save_model` drops for tensors that share memory."""
    expected = model.state_dict()
    by_memory = {_memory(expected[key]): key for key in state if key in expected}
    for key, value in expected.items():
        stored = by_memory.get(_memory(value))
        if key not in state and stored is not None and _memory(value) is not None:
            state[key] = state[stored]


def _memory(value: object) -> tuple[object, ...] | None:
    """Return the identity of a tensor with several names, or None if it can't be shared."""
    if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value) or value.numel() == 0:
        return None
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def _check_finite(state: State, model: nn.Module, path: Path) -> None:
    """Refuse NaN and infinity, except in buffers that the model itself builds (attention masks)."""
    constants = dict(model.named_buffers())
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all()):
            continue
        if key in constants and torch.equal(constants[key].cpu(), value.cpu()):
            continue
        count = int((~torch.isfinite(value)).sum())
        raise CheckpointError(
            f"{path}: {key} has {count} of {value.numel()} values that are NaN or infinite, "
            "expected finite weights. The training diverged or the file is damaged: train again."
        )


def _difference(state: State, model: nn.Module) -> str:
    """Describe a few missing, unexpected and misshapen entries. Empty if there are none."""
    expected = model.state_dict()
    missing = [key for key in expected if key not in state]
    unexpected = [key for key in state if key not in expected]
    shapes = [
        f"{key} is {_shape(state[key])}, the model's is {_shape(expected[key])}"
        for key in expected
        if key in state and _shape(state[key]) != _shape(expected[key])
    ]
    parts = (("missing", missing), ("unexpected", unexpected), ("other shapes", shapes))
    return "; ".join(f"{len(keys)} {name}: {list_first(keys)}" for name, keys in parts if keys)


def _shape(value: object) -> str:
    if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value):
        return "of no fixed shape"
    return "x".join(map(str, value.shape)) or "scalar"

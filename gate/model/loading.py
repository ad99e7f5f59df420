"""Models and weights by name, through torchvision's own registry and loading code."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import nn

from gate.errors import CheckpointError, ModelError, first_line

_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.")


def torchvision_model(name: str, *, weights: str | None, num_classes: int | None) -> nn.Module:
    """Build the torchvision model `name`, with `weights` (`IMAGENET1K_V1`, `DEFAULT`) or none.

    Weights are taken from the torch hub cache, or downloaded into it. A file whose name carries a
    hash must have that hash, and may hold nothing but tensors. With weights and another
    `num_classes`, the modules whose size depends on it (the heads) are new and random: seed
    before the call. Raises ModelError for unknown names or numbers, CheckpointError where the
    weights can't be had or are unsafe.
    """
    import torchvision.models as zoo

    if name not in zoo.list_models():
        raise ModelError(f"torchvision has no model {name!r}.{_closest(name, zoo.list_models())}")
    if num_classes is not None and num_classes < 1:
        raise ModelError(f"num_classes is {num_classes}, expected at least 1.")
    if weights is None:
        return _build(name, num_classes)
    entry = _weights_entry(name, weights)
    _fetch_safely(entry)
    model = _called(name, weights=entry)
    if num_classes is not None and num_classes != len(entry.meta.get("categories", ())):
        _replace_heads(model, _build(name, num_classes), name)
    return model


def _build(name: str, num_classes: int | None) -> nn.Module:
    """An untrained model; detection and segmentation models would else fetch a backbone."""
    import torchvision.models as zoo

    arguments: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    parameters = inspect.signature(zoo.get_model_builder(name)).parameters
    if "weights_backbone" in parameters:
        arguments["weights_backbone"] = None
    if name in {"googlenet", "inception_v3"}:
        # Their default (True) warns that it will change.
        arguments["init_weights"] = True
    return _called(name, weights=None, **arguments)


def _called(name: str, **arguments: Any) -> nn.Module:
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
    """Put the weights into the cache, and prove that the file is whole and holds only tensors.

    torchvision's builders unpickle without `weights_only` and check the hash at download alone.
    """
    file_name = Path(urlparse(entry.url).path).name
    cached = Path(torch.hub.get_dir()) / "checkpoints" / file_name
    remedy = (
        f"Place the file {file_name} in {cached.parent} (TORCH_HOME moves it), "
        "or give a local checkpoint instead (model.checkpoint)."
    )
    if cached.exists():
        _check_hash(cached, remedy)
    try:
        # stdout may be a machine's to read; torch announces the download there.
        with contextlib.redirect_stdout(sys.stderr):
            entry.get_state_dict(
                progress=sys.stderr.isatty(), check_hash=True, map_location="cpu", weights_only=True
            )
    except Exception as error:
        doing = "read" if cached.exists() else "download"
        raise CheckpointError(
            f"cannot {doing} the weights {entry} from {cached if doing == 'read' else entry.url}: "
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
            f"it is not whole or was changed. Delete it. {remedy}"
        )


def _replace_heads(model: nn.Module, fresh: nn.Module, name: str) -> None:
    """Take the modules from `fresh` whose parameters have another shape than in `model`."""
    wanted = fresh.state_dict()
    differing = [
        key for key, value in model.state_dict().items()
        if key not in wanted or wanted[key].shape != value.shape
    ]  # fmt: skip
    owners = {key.rpartition(".")[0] for key in differing}
    if "" in owners or any(key not in wanted for key in differing):
        raise ModelError(
            f"{name} with weights can't be given another number of classes: its structure depends "
            "on it. Leave num_classes out, or write a factory that builds the model."
        )
    for owner in sorted(owners):
        model.set_submodule(owner, fresh.get_submodule(owner))


def _closest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=3)
    return f" Did you mean {' or '.join(near)}?" if near else " See torchvision.models.list_models."

"""Options of a command that compares a file with the version that serves now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gate.decision.champion import Champion
    from gate.policy.policy import Policy
    from gate.registry.registered_model import RegisteredModel

AGAINST = click.option(
    "--against", metavar="NAME",
    help="The registered model whose champion the file is compared with, on the same samples: "
    "what changes, and the policy's bounds in incumbent:. Needs --ledger, --tracking-uri.",
)  # fmt: skip


def champion_against(
    name: str | None, *, policy: Policy, places: tuple[str, Path], into: Path
) -> Champion | None:
    """The champion of the registered model `name`, its files below `into`; None: none is named.

    `places`: the registry's address and the ledger. Where the policy bounds nothing against it, it
    is only shown, and what goes wrong is said there. Else raises the RegistryErrors,
    EvidenceError, StorageError.
    """
    if name is None:
        return None
    from gate.registry.comparison.incumbent import champion_if_any, champion_of

    fetch = champion_if_any if policy.incumbent is None else champion_of
    return fetch(_model(name, *places), into=into)


def champion_shown(name: str, *, uri: str, ledger: Path) -> Champion:
    """What is known of the champion, without its file; what goes wrong is said there."""
    from gate.registry.comparison.incumbent import champion_if_any
    from gate.storage.temporary import temporary_folder

    with temporary_folder() as folder:
        champion = champion_if_any(_model(name, uri, ledger), into=folder)
        return replace(champion, onnx_path=None)


def _model(name: str, uri: str, ledger: Path) -> RegisteredModel:
    from gate.registry.ledger import Ledger
    from gate.registry.mlflow.registry import MlflowRegistry
    from gate.registry.registered_model import RegisteredModel

    return RegisteredModel(MlflowRegistry(uri), Ledger(ledger), name)

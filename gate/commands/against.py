"""Options of a command that compares a file with the version that serves now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from gate.commands.options import tracking_uri
from gate.commands.signing import local_keys
from gate.commands.state import read_ledger

if TYPE_CHECKING:
    from gate.attestation.trust import Trust
    from gate.decision.champion import Champion
    from gate.decision.decision import Decision
    from gate.policy.policy import Policy
    from gate.records.evidence import Evidence
    from gate.registry.registered_model import RegisteredModel
    from gate.story.story import Change

AGAINST = click.option(
    "--against", metavar="NAME",
    help="The registered model whose champion the file is compared with, on the same samples: "
    "what changes, and the policy's bounds in incumbent:. Needs --tracking-uri, and to prove the "
    "champion --state, or statements on it that --trust believes.",
)  # fmt: skip


@dataclass(frozen=True)
class Against:
    """A registered model whose champion a file is compared with."""

    model: RegisteredModel
    trust: Trust | None
    """Whose statements on the champion are believed, where the ledger does not tell of it."""

    @classmethod
    def of_options(cls, name: str, options: Mapping[str, Any]) -> Self:
        """As the options of gate check name it. Raises BadParameter, UsageError, PolicyError,
        EvidenceError, KeyUnusable, StorageError."""
        from gate.registry.mlflow.registry import MlflowRegistry
        from gate.registry.registered_model import RegisteredModel

        registry = MlflowRegistry(tracking_uri(options["tracking_uri"]))
        model = RegisteredModel(registry, read_ledger(options["state"]), name)
        keys, trust = local_keys(), options["trust"]
        if options["report"] is None:
            return cls(model, keys.trust_if_any(trust))
        # What is signed here has a key, so that there is a trust, too.
        return cls(model, keys.trust(trust, key=options["key"]))

    def champion(self, *, policy: Policy, into: Path) -> Champion:
        """The champion, its files below `into`.

        Where the policy bounds nothing against it, it is only shown, and what goes wrong is said
        there. Else raises the RegistryErrors, EvidenceError, StorageError.
        """
        from gate.registry.comparison.incumbent import champion_if_any, champion_of

        fetch = champion_if_any if policy.incumbent is None else champion_of
        return fetch(self.model, into=into, trust=self.trust)


def champion_shown(model: RegisteredModel, trust: Trust | None = None) -> Champion:
    """What is known of the champion, without its file; what goes wrong is said there."""
    from gate.registry.comparison.incumbent import champion_if_any
    from gate.storage.temporary import temporary_folder

    with temporary_folder() as folder:
        return replace(champion_if_any(model, into=folder, trust=trust), onnx_path=None)


def change_against(
    model: RegisteredModel, decision: Decision, evidence: Evidence, *, trust: Trust | None
) -> Change:
    """Against what serves now, where gate check did not compare: by the records of both. What goes
    wrong is said there."""
    from gate.story.change import change_of

    return change_of(decision, evidence, champion_shown(model, trust))

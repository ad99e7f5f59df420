"""`gate rollback`: the version that served before serves again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Unpack

import click

from gate.commands.given import POLICY_FILE
from gate.commands.options import TRACKING_URI, tracking_uri
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.promoted import promoted
from gate.commands.state import LedgerPlace, place_of, with_writing, written_ledger


class _Options(LedgerPlace):
    """Those that say where."""

    policy: Path | None


@click.command("rollback", short_help="Put the previous version back into service.")
@click.argument("model")
@click.option("--reason", default="asked for on the command line", help="Kept in the ledger.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option(
    "--policy", type=POLICY_FILE,
    help="Which names the reviewers' tag, if that is another one than gate.review.",
)  # fmt: skip
@with_writing
@TRACKING_URI
@machine_options
def command(
    model: str,
    reason: str,
    yes: bool,
    tracking_uri: str | None,
    **options: Unpack[_Options],
) -> Outcome:
    """Point the alias 'champion' of the registered MODEL at the version of 'previous'.

    The old bytes are downloaded and hashed first: they must be those that the ledger recorded.

    \b
    Examples:
      gate rollback digits
      gate rollback digits --yes --reason "wrong class order in production"
    """
    if not yes:
        _ask(model)
    return _roll_back(model, reason, options=options, address=tracking_uri)


def _ask(model: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("nobody is there to confirm the rollback: say --yes.")
    click.confirm(f"Put the previous version of '{model}' into service?", abort=True, err=True)


def _roll_back(model: str, reason: str, *, options: _Options, address: str | None) -> Outcome:
    from gate.policy.policy import Policy
    from gate.registry.mlflow.registry import MlflowRegistry, preflight
    from gate.registry.page.reviewer import ReviewRule
    from gate.registry.promotion import rollback

    policy = options["policy"]
    uri, written = tracking_uri(address), written_ledger(place_of(options))
    rule = None if policy is None else ReviewRule.of(Policy.of_file(policy))
    preflight(uri)
    with spinner("rolling back"):
        registry = MlflowRegistry(uri)
        done = rollback(registry, model, ledger=written, reason=reason, reviews=rule)
    about = (
        e for e in reversed(written.entries()) if (e.model, e.version) == (model, done.version)
    )
    digest = next((entry.sha256 for entry in about if entry.sha256), None)
    return promoted(done, name=model, digest=digest, uri=uri)

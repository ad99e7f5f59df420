"""`gate history`, `--verify`, `checkpoint`, `export`; `gate accept-ledger`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import click

from gate.commands import loaders
from gate.commands.click_types import ExistingPath, ModelName, OutputPath
from gate.commands.options import FILE, SIGNING_TRUST, TRACKING_URI, with_state
from gate.commands.options import tracking_uri as uri_of
from gate.commands.progress import spinner
from gate.commands.result import (
    CommandResult,
    Dispatch,
    ExitCode,
    machine_options,
    print_lines,
)
from gate.errors import DigestMismatch, EvidenceError, KeyUnusable, Untrusted
from gate.storage.files import write_bytes
from gate.storage.safe_text import make_printable, shorten
from gate.storage.untrusted_files import read_untrusted
from gate.storage.workspace import SEPARATOR, ModelKey, current_workspace

if TYPE_CHECKING:
    from rich.console import Console

    from gate.ledger.entry import LedgerEntry
    from gate.ledger.ledger import Ledger
    from gate.ledger.maintenance import Audit, Checkpoint
    from gate.signing.keys import PublicKey
    from gate.signing.trust import Trust


@click.command("accept-ledger", short_help="Say that a shorter or another ledger is meant.")
@click.option("--reason", required=True, help="Kept in the ledger, with your name.")
@click.option(
    "--store", type=FILE, default=Path(".gate/store"), show_default=True,
    envvar="GATE_STORE", show_envvar=True, help="The service's store.",
)  # fmt: skip
@loaders.with_writing
@machine_options
def accept_ledger_command(
    reason: str, store: Path, **place: Unpack[loaders.LedgerOptions]
) -> CommandResult:
    """Let the service go on from the ledger as it is now.

    The service keeps in its store where the ledger ended, and refuses one that is shorter or other
    than it was: restore the newest copy. Where that is lost for good, or another ledger is to take
    its place, this says so, and writes a line that names what was lost. Where no trusted writer
    signed the last line, this line, signed by one, says that it is right.

    \b
    Examples:
      gate accept-ledger --reason "the disk died, this is Monday's copy"
      gate accept-ledger --reason "moved to a new ledger" --store /srv/models \\
          --state postgresql://gate@db.internal/gate --key /etc/gate/service.pem
    """
    from gate.ledger.maintenance import accept_rewrite
    from gate.service.reconciler import stored_head

    if not reason.strip():
        raise click.BadParameter("say why it is meant.", param_hint="--reason")
    with spinner("asking where the ledger's end is kept"):
        stored = stored_head(store)
        lost = accept_rewrite(loaders.written_ledger(place), stored, reason=reason)
    names = [stored.location]
    return CommandResult(
        ExitCode.DONE,
        {"accepted": bool(lost), "lost": list(lost), "asked": names},
        lambda console: _accept_ledger_show(lost, names, console),
    )


def _accept_ledger_show(lost: Sequence[str], names: Sequence[str], console: Console) -> None:
    if not lost:
        console.print(f"nothing to accept: the ledger holds all that is kept in {', '.join(names)}")
        return
    for line in lost:
        console.print(f"not in the ledger any more: {line}")
    console.print("the ledger is accepted as it is, and a line of it says so")


@click.command("override", short_help="Let MLflow's server move 'champion' around the gate.")
@click.argument("model", type=ModelName())
@click.option(
    "--champion", required=True, metavar="VERSION|none",
    help="The version that 'champion' may be pointed at; none: it may be deleted, and so may the "
    "model or its version.",
)  # fmt: skip
@click.option("--reason", required=True, help="Kept in the ledger, with your name.")
@loaders.with_writing
@TRACKING_URI
@machine_options
def override_command(
    model: str,
    champion: str,
    reason: str,
    tracking_uri: str | None,
    **place: Unpack[loaders.LedgerOptions],
) -> CommandResult:
    """Let MLflow's server with the app parity-gate accept one change of the registered MODEL.

    Writes a signed ledger entry, which counts until the next entry about this model. It changes no
    alias, and the service goes on examining what 'champion' points at.

    \b
    Examples:
      gate override digits --champion 3 --reason "incident 4711" --key /etc/gate/ops.pem
      gate override digits --champion none --reason "the model is retired"
    """
    from gate.mlflow_client.registry import MlflowRegistry
    from gate.registry.registered_model import RegisteredModel

    version = None if champion.casefold() == "none" else champion
    if version is not None and not version.isdecimal():
        raise click.BadParameter(
            f"expected a version number or none (seen: {champion!r}).", param_hint="--champion"
        )
    if not reason.strip():
        raise click.BadParameter("say why it is meant.", param_hint="--reason")
    registry = MlflowRegistry(uri_of(tracking_uri))
    about = RegisteredModel(registry, loaders.written_ledger(place), model)
    about.write("overridden", reason, version=version and str(int(version)))
    allowed = "be removed" if version is None else f"be pointed at version {version}"
    return CommandResult(
        ExitCode.DONE,
        {"model": about.key, "champion": version},
        lambda console: console.print(
            f"'champion' of {about.key} may {allowed}, until the next entry about this model"
        ),
    )


@click.command("checkpoint")
@click.option(
    "-o", "--output", type=OutputPath("file"), metavar="FILE", help="Default: the standard output."
)
@loaders.WRITER_KEY
@with_state
@machine_options
def history_checkpoint_command(output: Path | None, key: str | None, state: str) -> CommandResult:
    """Sign how many lines the ledger has, and the digest of the last one.

    A chain can't see that its end was removed. Who keeps this elsewhere can prove later that all
    these lines are still there: gate history --verify --checkpoint FILE. The last line has to be
    believed now: by GATE_TRUST, else .gate/trust.yaml, where that is.

    \b
    Examples:
      gate history checkpoint -o ledger-2026-11.json
      gate history checkpoint -o ledger-2026-11.json --key awskms:alias/auditor
    """
    from gate.ledger.maintenance import Checkpoint

    signing_key = loaders.local_keys().signing_key_if_any(key)
    if signing_key is None:
        raise KeyUnusable(
            "there is no key to sign the checkpoint with, and an unsigned one proves nothing. Name "
            "one with --key or GATE_SIGNING_KEY, or make one: gate keys new."
        )
    checkpoint = Checkpoint.from_ledger(loaders.believed_ledger(state))
    data = checkpoint.signed(signing_key).data
    if output is not None:
        write_bytes(output, data)
    plain = {
        **checkpoint.to_plain(),
        "key_id": signing_key.public.key_id,
        "output": None if output is None else str(output),
        "statement": json.loads(data),
    }

    def show(console: Console) -> None:
        if output is None:
            click.echo(data, nl=False)
        else:
            console.print(
                f"{output}: {checkpoint.lines} lines, the last with digest {checkpoint.head}, "
                f"signed by {signing_key.public.label}"
            )

    return CommandResult(ExitCode.DONE, plain, show)


@click.command("export")
@click.option(
    "-o", "--output", type=OutputPath("file"), metavar="FILE", help="Default: the standard output."
)
@with_state
@machine_options
def history_export_command(output: Path | None, state: str) -> CommandResult:
    """Write the ledger's lines as they are, one JSON text each, after its chain was verified.

    They are what other programs read. Signatures stay in the
    database: keep a checkpoint with them (gate history checkpoint).

    \b
    Examples:
      gate history export -o ledger-2026-11.jsonl
      gate history export | jq 'select(.action == "promoted")'
    """
    if output is None and "--json" in click.get_current_context().obj.arguments:
        raise click.UsageError("what is exported is lines of JSON: name their file with -o.")
    ledger = loaders.existing_ledger(state)
    lines = list(exported(ledger))
    if output is not None:
        write_bytes(output, b"".join(lines))
    plain = {
        "ledger": ledger.location,
        "output": None if output is None else str(output),
        "lines": len(lines),
    }

    def show(console: Console) -> None:
        if output is not None:
            console.print(f"{len(lines)} lines in {output}")
            return
        for line in lines:
            click.echo(line, nl=False)

    return CommandResult(ExitCode.DONE, plain, show)


def exported(ledger: Ledger) -> Iterator[bytes]:
    """Yield all lines as they are, each with its newline, after the ledger is verified. Raises what
    `Ledger.verify` raises."""
    from gate.ledger.ledger import proven

    ledger.verify()
    rows = ledger.rows()
    proven(rows, place=ledger.location)
    return (row.line + b"\n" for row in rows)


Kept = tuple["Checkpoint", tuple["PublicKey", ...], int]
"""A verified checkpoint, the keys that signed it, and how many lines were added afterwards."""


def verified(state: str, *, trust: Path | None, checkpoint: Path | None) -> CommandResult:
    """Verify chain, signatures and checkpoint.

    A failed verification is a result. An impossible one is an error: raises the exceptions of
    `existing_ledger`, StateUnavailable, PolicyError, UsageError.
    """
    from gate.ledger.maintenance import audit_ledger

    ledger = loaders.existing_ledger(state)
    ledger.trust = believed = loaders.local_keys().trust_if_any(trust)
    if checkpoint is not None and believed is None:
        raise click.UsageError("a checkpoint is believed by its signature: say whose with --trust.")
    try:
        proven, kept = audit_ledger(ledger), None
        if checkpoint is not None and believed is not None:
            kept = _kept(checkpoint, ledger, believed)
    except (DigestMismatch, EvidenceError, Untrusted) as error:
        problem = str(error)
        plain = {"holds": False, "problem": problem, "ledger": ledger.location}
        text = f"the ledger does not hold: {problem}"
        return CommandResult(
            ExitCode.REJECTED, plain, lambda console: print_lines(console, text, style="bold red")
        )
    return CommandResult(
        ExitCode.DONE,
        {
            "holds": True,
            "problem": None,
            "ledger": ledger.location,
            "lines": proven.lines,
            "head": None if proven.head is None else str(proven.head),
            "signed_by": proven.by_key,
            "accepted": list(proven.accepted),
            "checkpoint": None if kept is None else _plain(kept),
        },
        lambda console: _show_verified(ledger, proven, kept, console),
    )


def _kept(path: Path, ledger: Ledger, trust: Trust) -> Kept:
    from gate.ledger.maintenance import Checkpoint, checkpoint_signers
    from gate.signing.statement import ENVELOPE_LIMIT, SignedStatement

    signed = SignedStatement.from_bytes(read_untrusted(path, limit=ENVELOPE_LIMIT), what=str(path))
    signers = checkpoint_signers(signed, trust=trust)
    checkpoint = Checkpoint.from_statement(signed, what="the checkpoint")
    return checkpoint, signers, checkpoint.verify(ledger)


def _plain(kept: Kept) -> dict[str, Any]:
    checkpoint, signers, since = kept
    keys = [key.key_id for key in signers]
    return {"lines": checkpoint.lines, "at": checkpoint.at, "since": since, "signers": keys}


def _show_verified(ledger: Ledger, proven: Audit, kept: Kept | None, console: Console) -> None:
    last = "" if proven.head is None else f", the last with digest {proven.head}"
    lines = [f"the ledger {ledger.location} holds: {proven.lines} lines{last}"]
    writers = () if ledger.trust is None else ledger.trust.writers
    if writers:
        counts = [
            f"{proven.by_key[key.key_id]} by {key.label}"
            for key in writers
            if key.key_id in proven.by_key
        ]
        trusted = "" if ledger.trust is None else ledger.trust.by
        lines.append(f"signed: {', '.join(counts) or 'none'}; trusted{trusted}")
    else:
        lines.append("signatures were not looked at: no writers are trusted (--trust)")
    if proven.accepted:
        numbers = ", ".join(map(str, proven.accepted))
        lines.append(f"vouched for by a later line of a trusted writer only: {numbers}")
    if kept is not None:
        checkpoint, signers, since = kept
        names = ", ".join(key.label for key in signers)
        lines.append(
            f"the checkpoint of {checkpoint.at}, signed by {names}: its {checkpoint.lines} lines "
            f"are there, {since} came since"
        )
    print_lines(console, *lines)


_NONE = "The ledger has no such entries."

_WIDE = 70
"""Columns from which the year and the digest fit."""


@dataclass(frozen=True)
class _Line:
    """An entry, where it stands, and by which key it was signed."""

    entry: LedgerEntry
    number: int = 0
    key_id: str | None = None


@click.command(
    "history",
    cls=Dispatch,
    subcommands={
        "export": "gate.commands.history:history_export_command",
        "checkpoint": "gate.commands.history:history_checkpoint_command",
    },
    short_help="Print the ledger, and prove it.",
)
@click.option("--model", help="Only this registered model.")
@click.option(
    "--metric", metavar="NAME",
    help="Print a metric of the policy over the versions of --model instead of the ledger.",
)  # fmt: skip
@TRACKING_URI
@click.option("--limit", type=click.IntRange(min=1), help="Only the newest so many.")
@click.option("-v", "--verbose", is_flag=True, help="All columns, signers, the reasons in full.")
@click.option(
    "--verify", is_flag=True,
    help="Print no lines: prove the chain, and that trusted writers signed it.",
)  # fmt: skip
@click.option(
    "--checkpoint", type=ExistingPath(EvidenceError, "what gate history checkpoint wrote"),
    metavar="FILE",
    help="With --verify: prove, too, that all lines are there that were there when it was made.",
)  # fmt: skip
@SIGNING_TRUST
@with_state
@machine_options
def command(
    model: str | None,
    metric: str | None,
    tracking_uri: str | None,
    limit: int | None,
    verbose: bool,
    verify: bool,
    checkpoint: Path | None,
    trust: Path | None,
    state: str,
) -> CommandResult:
    """Print the ledger: promotions, refusals, rollbacks and what was deployed. Newest last.

    One line an entry; the whole text with -v or --json. The chain of hashes is verified on
    reading: a changed or removed line is an error. With --verify, exit code 1: something was
    changed, removed, or not signed by a trusted writer, and by which line it shows.

    \b
    Subcommands, each with its own --help:
      gate history export                   its lines, as JSON
      gate history checkpoint               where it ends now, signed, for an auditor to keep

    \b
    Examples:
      gate history
      gate history -v --limit 3
      gate history --model digits --limit 5 --json
      gate history --model detector --metric map50
      gate history --verify --trust trust.yaml
      gate history --verify --trust trust.yaml --checkpoint 2026-11.json
    """
    if metric is not None:
        if model is None:
            raise click.UsageError("--metric needs --model: the registered model.")
        return metric_history(model, metric, state=state, uri=tracking_uri, limit=limit)
    if verify:
        return verified(state, trust=trust, checkpoint=checkpoint)
    if checkpoint:
        raise click.UsageError("--checkpoint goes with --verify.")
    ledger = loaders.existing_ledger(state)
    entries, rows = ledger.entries(), ledger.rows()
    key = None if model is None else _key(model)
    lines = [
        _Line(entry, row.number, _key_id(row.signature))
        for entry, row in zip(entries, rows, strict=False)  # one may have come meanwhile
        if key is None or entry.key == key
    ]
    shown = lines[-limit:] if limit else lines
    return CommandResult(
        ExitCode.DONE,
        {
            "entries": [
                line.entry.to_plain() | {"line": line.number, "signed_by": line.key_id}
                for line in shown
            ],
            "total": len(lines),
        },
        lambda console: (_show_all if verbose else _history_show)(shown, console),
    )


def metric_history(
    model: str, metric: str, *, state: str, uri: str | None, limit: int | None
) -> CommandResult:
    """Return the values of a metric over the versions that served, the oldest first, as they lie
    beside the champion. Raises EvidenceError where there is none, and the RegistryErrors."""
    from gate.mlflow_client.registry import MlflowRegistry
    from gate.registry.registered_model import RegisteredModel

    registered = RegisteredModel(MlflowRegistry(uri_of(uri)), loaders.read_ledger(state), model)
    champion = loaders.champion_shown(registered)
    names = sorted({name for row in champion.trend.rows for name in row.metrics})
    rows = [
        {"sha256": str(row.sha256), "measured_at": row.measured_at} | row.metrics[metric].to_plain()
        for row in champion.trend.rows
        if metric in row.metrics
    ]
    if not rows:
        raise EvidenceError(
            f"no version of {model} has the metric {metric!r}: "
            + (f"they have {', '.join(names)}." if names else champion.absent or "none was judged.")
        )
    shown = rows[-limit:] if limit else rows
    return CommandResult(
        ExitCode.DONE,
        {"model": model, "metric": metric, "versions": shown},
        lambda console: _show_metric(shown, console),
    )


def _show_metric(rows: Sequence[dict[str, Any]], console: Console) -> None:
    from gate.report.terminal import print_table

    headings = ("measured", "file", "value", "from", "to")
    console.print(
        print_table(
            headings,
            [
                (
                    row["measured_at"][:16].replace("T", " "),
                    row["sha256"].removeprefix("sha256:")[:12],
                    *(f"{float(row[name]):.6g}" for name in ("value", "low", "high")),
                )
                for row in rows
            ],
            right=headings[2:],
        )
    )


def _key(model: str) -> str:
    """Return the key of a model of any name: the ledger may have a name that is not allowed now."""
    if SEPARATOR in model:
        return str(ModelKey.parse(model))
    return str(ModelKey(current_workspace(), model))


def _key_id(signature: str | None) -> str | None:
    """Return the ID of the key that a signature claims; only --verify verifies it."""
    try:
        return None if signature is None else str(json.loads(signature)["keyid"])
    except (ValueError, KeyError, TypeError):
        return "unreadable"


def _history_show(lines: list[_Line], console: Console) -> None:
    """One line an entry: what does not fit is cut off the reason."""
    from rich.text import Text

    entries = [line.entry for line in lines]
    several, wide = len({entry.key for entry in entries}) > 1, console.width >= _WIDE
    rows = [_cells(entry, several=several, wide=wide) for entry in entries]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))] if rows else []
    for entry, row in zip(entries, rows, strict=True):
        start = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        text = Text(f"{start}  {make_printable(entry.reason)}")
        text.truncate(console.width, overflow="ellipsis")
        console.print(text, no_wrap=True)
    if not entries:
        console.print(_NONE)


def _cells(entry: LedgerEntry, *, several: bool, wide: bool) -> list[str]:
    """Return the cells before the reason."""
    minute = entry.at[:16].replace("T", " ")
    cells = [minute if wide else minute[5:], entry.action]
    cells += [shorten(entry.key, 20 if wide else 8)] if several else []
    cells.append(entry.version or "-")
    cells += [entry.sha256.short if entry.sha256 else ""] if wide else []
    return [make_printable(cell) for cell in cells]


def _show_all(lines: list[_Line], console: Console) -> None:
    """Print all details of each entry, in full."""
    from rich.text import Text

    for line in lines:
        entry = line.entry
        before = f", before: {entry.previous_version}" if entry.previous_version else ""
        version = f" version {entry.version}{before}" if entry.version else ""
        rows = (
            ("", f"{entry.at} {entry.action} {entry.key}{version}"),
            ("  file      ", str(entry.sha256 or "")),
            ("  policy    ", str(entry.policy_sha256 or "")),
            ("  actor     ", f"{entry.actor}, {entry.cause}" if entry.cause else entry.actor),
            ("  verdict   ", _signed("signed", entry.signers)),
            ("  review    ", _signed("approved", entry.approvers)),
            ("  line      ", f"{line.number}, {_signed('signed', [line.key_id or 'no key'])}"),
            ("  reason    ", entry.reason),
        )
        for label, text in rows:
            if text:
                console.print(Text(f"{label}{make_printable(text)}"))
    if not lines:
        console.print(_NONE)


def _signed(word: str, keys: Sequence[str]) -> str:
    """Return who signed, by the first digits of the key IDs, as `gate keys show` prints them."""
    return f"{word} by {', '.join(key[:12] for key in keys)}" if keys else ""

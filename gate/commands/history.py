"""`gate history`, `--verify`, `checkpoint`, `export`; `gate accept-ledger`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import click

from gate.commands import loaders
from gate.commands.click_types import ExistingPath, ModelName, OutputPath
from gate.commands.options import FILE, SIGNING_TRUST, STATE_URL, TRACKING_URI
from gate.commands.options import tracking_uri as uri_of
from gate.commands.progress import spinner
from gate.commands.result import (
    CommandResult,
    Dispatch,
    ExitCode,
    Parsed,
    machine_options,
    table_result,
    text_result,
)
from gate.errors import DigestMismatch, EvidenceError, KeyUnusable, StorageError, Untrusted
from gate.storage.files import write_bytes
from gate.storage.safe_text import make_printable, shorten
from gate.storage.untrusted_files import read_untrusted
from gate.storage.workspace import SEPARATOR, ModelKey, current_workspace

if TYPE_CHECKING:
    from rich.console import Console

    from gate.ledger.entry import LedgerEntry
    from gate.ledger.ledger import Ledger
    from gate.ledger.maintenance import Audit
    from gate.signing.trust import Trust


def _parse_reason(text: str) -> str:
    if not text.strip():
        raise ValueError("state the reason")
    return text


_REASON = click.option(
    "--reason", required=True, metavar="TEXT", type=Parsed("text", _parse_reason),
    help="Recorded in the ledger with your name.",
)  # fmt: skip

_STORE = Path(".gate/store")

_OUTPUT = click.option(
    "-o", "--output", type=OutputPath("file"), metavar="FILE", help="Default: the standard output."
)


@click.command("accept-ledger", short_help="Accept a shorter or replaced ledger.")
@_REASON
@click.option(
    "--store", type=FILE, default=_STORE, show_default=True,
    envvar="GATE_STORE", show_envvar=True, help="The service's store.",
)  # fmt: skip
@loaders.with_writing
@machine_options
def accept_ledger_command(
    reason: str, store: Path, **ledger_options: Unpack[loaders.LedgerOptions]
) -> CommandResult:
    """Let the service continue from the current state of the ledger.

    The service stores the position of the ledger's end. It refuses a ledger that was truncated or
    replaced; normally you restore the newest copy. If that copy is lost, or the ledger was replaced
    on purpose, this command accepts the ledger and adds an entry that lists what was lost. If no
    trusted writer signed the last line, the new entry, signed by a trusted writer, confirms it.

    \b
    Examples:
      gate accept-ledger --reason "the disk died, this is Monday's copy"
      gate accept-ledger --reason "moved to a new ledger" --store /srv/models \\
          --state postgresql://gate@db.internal/gate --key /etc/gate/service.pem
    """
    from gate.ledger.maintenance import accept_rewrite
    from gate.service.reconciler import stored_head

    if store != _STORE and not store.is_dir():
        raise StorageError(f"--store: {store} is not a folder. Expected the service's store.")
    with spinner("reading the position of the ledger's end"):
        stored = stored_head(store)
        lost = accept_rewrite(loaders.open_writable_ledger(ledger_options), stored, reason=reason)
    lines = [f"no longer in the ledger: {line}" for line in lost]
    lines.append(
        "the ledger is accepted, and an entry records this"
        if lost
        else f"nothing to accept: the ledger matches the position in {stored.location}"
    )
    plain = {"accepted": bool(lost), "lost": list(lost), "asked": [stored.location]}
    return text_result(plain, *lines)


@click.command("override", short_help="Let MLflow's server accept one move of 'champion'.")
@click.argument("model", type=ModelName())
@click.option(
    "--champion", required=True, metavar="VERSION|none",
    help="The version that 'champion' may be set to; none: the alias, the model and its versions "
    "may be deleted.",
)  # fmt: skip
@_REASON
@loaders.with_writing
@TRACKING_URI
@machine_options
def override_command(
    model: str,
    champion: str,
    reason: str,
    tracking_uri: str | None,
    **ledger_options: Unpack[loaders.LedgerOptions],
) -> CommandResult:
    """Let an MLflow server with the app parity-gate accept one change of the registered MODEL.

    Writes a signed ledger entry, which is valid until the next entry about this model. It changes
    no alias, and the service continues to examine the version of 'champion'.

    \b
    Examples:
      gate override digits --champion 3 --reason "incident 4711" --key /etc/gate/ops.pem
      gate override digits --champion none --reason "the model is retired"
    """
    from gate.mlflow_client.connection import refuse_folder
    from gate.mlflow_client.registry import MlflowRegistry
    from gate.registry.registered_model import RegisteredModel

    version = None if champion.casefold() == "none" else champion
    if version is not None and not version.isdecimal():
        raise click.BadParameter(
            f"expected a version number or none (seen: {champion!r}).", param_hint="--champion"
        )
    uri = uri_of(tracking_uri)
    refuse_folder(uri)
    registry = MlflowRegistry(uri)
    registered = RegisteredModel(registry, loaders.open_writable_ledger(ledger_options), model)
    registered.write("overridden", reason, version=version and str(int(version)))
    allowed = "be removed" if version is None else f"be set to version {version}"
    return text_result(
        {"model": registered.key, "champion": version},
        f"'champion' of {registered.key} may {allowed}, until the next entry about this model",
    )


@click.command("checkpoint")
@_OUTPUT
@loaders.WRITER_KEY
@STATE_URL
@machine_options
def history_checkpoint_command(output: Path | None, key: str | None, state: str) -> CommandResult:
    """Sign the number of lines of the ledger and the digest of the last one.

    A hash chain can't detect that its end was removed. An auditor who stores the checkpoint
    elsewhere can prove later that all these lines still exist: gate history --verify --checkpoint
    FILE. The last line must be trusted now, by GATE_TRUST or .gate/trust.yaml, if one exists.

    \b
    Examples:
      gate history checkpoint -o ledger-2026-11.json
      gate history checkpoint -o ledger-2026-11.json --key awskms:alias/auditor
    """
    from gate.ledger.maintenance import Checkpoint

    signing_key = loaders.local_keys().signing_key_if_any(key)
    if signing_key is None:
        raise KeyUnusable(
            "no key to sign the checkpoint with; an unsigned one proves nothing. Name a key with "
            "--key or GATE_SIGNING_KEY, or create one: gate keys new."
        )
    checkpoint = Checkpoint.from_ledger(loaders.open_trusted_ledger(state))
    data = checkpoint.sign(signing_key).data
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
@_OUTPUT
@STATE_URL
@machine_options
def history_export_command(output: Path | None, state: str) -> CommandResult:
    """Verify the ledger and write its lines as JSON lines, for other programs.

    Signatures stay in the database: store a checkpoint with the lines (gate history checkpoint).

    \b
    Examples:
      gate history export -o ledger-2026-11.jsonl
      gate history export | jq 'select(.action == "promoted")'
    """
    if output is None and "--json" in click.get_current_context().obj.arguments:
        raise click.UsageError("--json requires -o FILE: the exported lines are JSON themselves.")
    ledger = loaders.open_existing_ledger(state)
    lines = export_lines(ledger)
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


def export_lines(ledger: Ledger) -> list[bytes]:
    """Verify the ledger; return all lines unchanged, each with its newline.

    Raises the exceptions of `Ledger.verify`.
    """
    from gate.ledger.ledger import verify_rows

    ledger.verify()
    rows = ledger.rows()
    verify_rows(rows, location=ledger.location)
    return [row.line + b"\n" for row in rows]


def verify_ledger(state: str, *, trust: Path | None, checkpoint: Path | None) -> CommandResult:
    """Verify chain, signatures and checkpoint.

    A failed verification is returned as a result. Raises the exceptions of `open_existing_ledger`,
    StateUnavailable, PolicyError, UsageError if the ledger can't be verified at all.
    """
    from gate.ledger.maintenance import audit_ledger

    ledger = loaders.open_existing_ledger(state)
    ledger.trust = trusted = loaders.local_keys().trust_if_any(trust)
    if checkpoint is not None and trusted is None:
        raise click.UsageError("--checkpoint needs trusted keys: name a trust file with --trust.")
    verified, checkpoint_lines = None, []
    try:
        proven = audit_ledger(ledger)
        if checkpoint is not None and trusted is not None:
            verified, text = _verify_checkpoint(checkpoint, ledger, trusted)
            checkpoint_lines = [text]
    except (DigestMismatch, EvidenceError, Untrusted) as error:
        problem = str(error)
        plain = {"holds": False, "problem": problem, "ledger": ledger.location}
        text = f"the ledger is not valid: {problem}"
        return text_result(plain, text, status=ExitCode.REJECTED, style="bold red")
    return text_result(
        {
            "holds": True,
            "problem": None,
            "ledger": ledger.location,
            "lines": proven.lines,
            "head": None if proven.head is None else str(proven.head),
            "signed_by": proven.by_key,
            "accepted": list(proven.accepted),
            "checkpoint": verified,
        },
        *_verified_lines(ledger, proven),
        *checkpoint_lines,
    )


def _verify_checkpoint(path: Path, ledger: Ledger, trust: Trust) -> tuple[dict[str, Any], str]:
    """Verify a checkpoint; return its content as JSON values and as a sentence."""
    from gate.ledger.maintenance import Checkpoint, checkpoint_signers
    from gate.signing.statement import ENVELOPE_LIMIT, SignedStatement

    signed = SignedStatement.from_bytes(read_untrusted(path, limit=ENVELOPE_LIMIT), label=str(path))
    signers = checkpoint_signers(signed, trust=trust)
    checkpoint = Checkpoint.from_statement(signed, label="the checkpoint")
    since = checkpoint.verify(ledger)
    keys = [key.key_id for key in signers]
    plain = {"lines": checkpoint.lines, "at": checkpoint.at, "since": since, "signers": keys}
    names = ", ".join(key.label for key in signers)
    return plain, (
        f"the checkpoint of {checkpoint.at}, signed by {names}: all {checkpoint.lines} lines "
        f"exist, {since} were added since"
    )


def _verified_lines(ledger: Ledger, proven: Audit) -> list[str]:
    last = "" if proven.head is None else f", the last with digest {proven.head}"
    lines = [f"the ledger {ledger.location} is valid: {proven.lines} lines{last}"]
    trust = ledger.trust
    if trust is not None and trust.writers:
        counts = [
            f"{proven.by_key[key.key_id]} by {key.label}"
            for key in trust.writers
            if key.key_id in proven.by_key
        ]
        lines.append(f"signed: {', '.join(counts) or 'none'}; trusted{trust.by}")
    else:
        lines.append("signatures were not verified: no writers are trusted (--trust)")
    if proven.accepted:
        numbers = ", ".join(map(str, proven.accepted))
        lines.append(f"accepted only by a later line of a trusted writer: {numbers}")
    return lines


_NONE = "The ledger has no such entries."

_WIDE = 70
"""Minimum width in columns that fits the year and the digest."""


@dataclass(frozen=True)
class _Line:
    """An entry with its line number and the ID of the signing key."""

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
    short_help="Print or verify the ledger.",
)
@click.option("--model", help="Only this registered model.")
@click.option(
    "--metric", metavar="NAME",
    help="Print this metric of the policy for each version of --model, instead of the ledger.",
)  # fmt: skip
@TRACKING_URI
@click.option("--limit", type=click.IntRange(min=1), help="Show only the last N entries.")
@click.option("-v", "--verbose", is_flag=True, help="Print all columns, signers, full reasons.")
@click.option(
    "--verify", is_flag=True,
    help="Verify the chain and the signatures of trusted writers, instead of printing entries.",
)  # fmt: skip
@click.option(
    "--checkpoint", type=ExistingPath(EvidenceError, "output of gate history checkpoint"),
    metavar="FILE",
    help="With --verify: also verify that no line of this checkpoint was removed.",
)  # fmt: skip
@SIGNING_TRUST
@STATE_URL
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
    """Print the ledger: promotions, refusals, rollbacks and deployments. Newest last.

    One line per entry; full text with -v or --json. The hash chain is verified on reading: a
    changed or removed line is an error. Exit code 1 with --verify: a line was changed, removed, or
    not signed by a trusted writer; its number is printed.

    \b
    Subcommands, each with its own --help:
      gate history export                   the lines, as JSON
      gate history checkpoint               the current end, signed, for an auditor

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
        return verify_ledger(state, trust=trust, checkpoint=checkpoint)
    if checkpoint:
        raise click.UsageError("--checkpoint goes with --verify.")
    ledger = loaders.open_existing_ledger(state)
    entries, rows = ledger.entries(), ledger.rows()
    key = None if model is None else _key(model)
    lines = [
        _Line(entry, row.number, _key_id(row.signature))
        for entry, row in zip(entries, rows, strict=False)  # an entry may be added in between
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
        lambda console: (_show_all if verbose else _show_short)(shown, console),
    )


def metric_history(
    model: str, metric: str, *, state: str, uri: str | None, limit: int | None
) -> CommandResult:
    """Return the values of a metric for the versions that served, oldest first, as recorded with
    the champion. Raises EvidenceError if no version has it, RegistryError."""
    from gate.mlflow_client.registry import MlflowRegistry
    from gate.registry.registered_model import RegisteredModel

    registered = RegisteredModel(MlflowRegistry(uri_of(uri)), loaders.read_ledger(state), model)
    champion = loaders.load_champion_records(registered)
    names = sorted({name for row in champion.trend.rows for name in row.metrics})
    versions = {str(e.sha256): e.version for e in registered.history().entries if e.version}
    rows = [
        {
            "version": versions.get(str(row.sha256)),
            "sha256": str(row.sha256),
            "measured_at": row.measured_at,
        }
        | row.metrics[metric].to_plain()
        for row in champion.trend.rows
        if metric in row.metrics
    ]
    if not rows:
        raise EvidenceError(
            f"no version of {model} has the metric {metric!r}: "
            + (f"they have {', '.join(names)}." if names else champion.absent or "none was judged.")
        )
    shown = rows[-limit:] if limit else rows
    headings = ("measured", "version", "file", "value", "from", "to")
    cells = [
        (
            _minute(row["measured_at"]),
            row["version"] or "-",
            row["sha256"].removeprefix("sha256:")[:12],
            *(f"{float(row[name]):.6g}" for name in ("value", "low", "high")),
        )
        for row in shown
    ]
    plain = {"model": model, "metric": metric, "versions": shown}
    return table_result(plain, headings, cells, right=headings[3:])


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")


def _key(model: str) -> str:
    """Return the key of a model. Older ledgers may have names that are not allowed today."""
    if SEPARATOR in model:
        return str(ModelKey.parse(model))
    return str(ModelKey(current_workspace(), model))


def _key_id(signature: str | None) -> str | None:
    """Return the ID of the key that a signature claims; only --verify verifies it."""
    try:
        return None if signature is None else str(json.loads(signature)["keyid"])
    except (ValueError, KeyError, TypeError):
        return "unreadable"


def _show_short(lines: list[_Line], console: Console) -> None:
    """Print one line per entry; the reason is truncated to the width of the console."""
    from rich.text import Text

    entries = [line.entry for line in lines]
    several, wide = len({entry.key for entry in entries}) > 1, console.width >= _WIDE
    rows = [_cells(entry, several=several, wide=wide) for entry in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for entry, row in zip(entries, rows, strict=True):
        start = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        text = Text(f"{start}  {make_printable(entry.reason)}")
        text.truncate(console.width, overflow="ellipsis")
        console.print(text, no_wrap=True)
    if not entries:
        console.print(_NONE)


def _cells(entry: LedgerEntry, *, several: bool, wide: bool) -> list[str]:
    """Return the cells before the reason."""
    minute = _minute(entry.at)
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
            ("  verdict   ", _signer_text("signed", entry.signers)),
            ("  review    ", _signer_text("approved", entry.approvers)),
            ("  line      ", f"{line.number}, {_signer_text('signed', [line.key_id or 'no key'])}"),
            ("  reason    ", entry.reason),
        )
        for label, text in rows:
            if text:
                console.print(Text(f"{label}{make_printable(text)}"))
    if not lines:
        console.print(_NONE)


def _signer_text(word: str, keys: Sequence[str]) -> str:
    """Return who signed, by the first digits of the key IDs, as `gate keys show` prints them."""
    return f"{word} by {', '.join(key[:12] for key in keys)}" if keys else ""

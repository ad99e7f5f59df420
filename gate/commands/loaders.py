"""The option `--state`: which database holds the ledger and the inbox, and the ledger in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import click

from gate.commands.options import FILE, KEPT_ELSEWHERE, address
from gate.commands.signing import local_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gate.ledger.head import Keeper
    from gate.ledger.ledger import Ledger

_Command = TypeVar("_Command", bound=Callable[..., Any])
_GONE = {"--ledger": "GATE_LEDGER", "--inbox": "GATE_INBOX"}
_INSTEAD = (
    "ledger and inbox lie in one database now. Name it with --state or GATE_STATE (sqlite:///FILE, "
    "postgresql://HOST/NAME; default: sqlite:///.gate/state.db), and bring an old ledger there "
    "once: gate history import FILE."
)

WHOSE_LINES = (
    "Default: .gate/trust.yaml, where it is; else no signature is asked for. That default takes a "
    "ledger without any signature as it is."
)
"""By which file a ledger is believed, for people."""
WRITER_KEY = click.option(
    "--key", metavar="URI", envvar="GATE_SIGNING_KEY", show_envvar=True,
    help="The key that signs: a file, awskms:…, gcpkms:…, azurekms:…, hsm:…. Default: the key of "
    "this folder, .gate/keys/local.pem, where there is one.",
)  # fmt: skip


class LedgerPlace(TypedDict):
    """Which ledger is meant, by what key this command writes there, and whose it believes."""

    state: str
    key: str | None
    trust: Path | None


def with_state(command: _Command) -> _Command:
    """Give a command `--state`, and an answer to whoever says what was said before it."""
    for name in _GONE:
        command = click.option(
            name, hidden=True, expose_value=False, callback=_refuse_option, metavar="…"
        )(command)
    return click.option(
        "--state", metavar="URL", default="sqlite:///.gate/state.db", show_default=True,
        envvar="GATE_STATE", show_envvar=True,
        help="The database of ledger and inbox: sqlite:///FILE, a FILE, or "
        f"postgresql://USER@HOST/NAME for several hosts. {KEPT_ELSEWHERE}",
    )(command)  # fmt: skip


def with_writing(command: _Command) -> _Command:
    """Give a command that writes into the ledger `--state`, its key, and whom it believes."""
    trust = click.option(
        "--trust", type=FILE, metavar="FILE", envvar="GATE_TRUST", show_envvar=True,
        help="Whose lines are believed: its writers must have signed the last one. "
        f"{WHOSE_LINES}",
    )  # fmt: skip
    return with_state(WRITER_KEY(trust(command)))


def named_state(given: str) -> str:
    """The URL of the database that was named. Raises BadParameter, UsageError, StorageError."""
    _refuse_environment()
    return _url(given)


def read_ledger(state: str) -> Ledger:
    """The ledger in the database that was named, to read; whose lines it believes:
    `gate.ledger.opening.believe`. Raises BadParameter, UsageError, EvidenceError where one of
    before the database was not imported, PolicyError, StorageError."""
    return _believe(_imported_ledger(state))


def existing_ledger(state: str) -> Ledger:
    """The same to show or to prove: of its signatures nothing is believed yet. Raises StorageError
    where there is none, too: that is no empty one."""
    from gate.errors import StorageError

    ledger = _imported_ledger(state)
    if not ledger.state.is_there:
        raise StorageError(
            f"there is no ledger at {ledger.place}: nothing was promoted or refused from this "
            "folder. Run make repro, or name another database with --state."
        )
    return ledger


def believed_ledger(state: str) -> Ledger:
    """One that is there, as `read_ledger` believes it. Raises as both."""
    return _believe(existing_ledger(state))


def written_ledger(place: LedgerPlace) -> Ledger:
    """As `read_ledger`, to write as well: with the key that signs, and the trust in its writers.
    Raises KeyUnusable, PolicyError, and Untrusted where nobody would believe the key, too."""
    ledger = new_ledger(place)
    require_written(ledger)
    return ledger


def require_written(ledger: Ledger) -> None:
    """Prove of one that `new_ledger` gave what `written_ledger` does. Raises as that."""
    from gate.ledger.opening import require_writable

    _refuse_environment()
    require_writable(ledger)


def new_ledger(place: LedgerPlace, *, keepers: Sequence[Keeper] = ()) -> Ledger:
    """As `written_ledger`, and nothing is proven yet: one of before may be there to import."""
    from gate.ledger.ledger import Ledger

    key = local_keys().signing_key_if_any(place["key"])
    return _believe(Ledger(_url(place["state"]), keepers=keepers, key=key), place["trust"])


def folder_trust() -> Path | None:
    """By which a service believes its ledger where no trust is named: the folder's own, if any."""
    own = local_keys().trust_path
    return own if own.exists() else None


def place_of(request: Mapping[str, Any]) -> LedgerPlace:
    """Those among the options of a command."""
    return LedgerPlace(state=request["state"], key=request["key"], trust=request["trust"])


def key_uri(given: str | None) -> str | None:
    """The address of the key that signs: this one, else that of this folder, if there is one."""
    own = local_keys().key_path
    return given or (str(own) if own.exists() else None)


def _imported_ledger(state: str) -> Ledger:
    from gate.ledger.ledger import Ledger
    from gate.ledger.opening import require_imported

    ledger = Ledger(named_state(state))
    require_imported(ledger)
    return ledger


def _believe(ledger: Ledger, trust: Path | None = None) -> Ledger:
    from gate.ledger.opening import believe

    return believe(ledger, local_keys(), trust)


def _url(given: str) -> str:
    from gate.state.address import state_url
    from gate.storage.redaction import redacted

    text = address(given) or given
    try:
        return state_url(text)
    except ValueError as error:
        raise click.BadParameter(
            f"{error} (seen: {redacted(text)!r})", param_hint="--state"
        ) from error


def _refuse_environment() -> None:
    """What the environment named before must not be left out without a word."""
    for variable in _GONE.values():
        if os.environ.get(variable):
            raise click.UsageError(
                f"the environment has {variable}, and nothing reads it any more: {_INSTEAD} Then "
                f"take {variable} out of the environment."
            )


def _refuse_option(_context: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(f"there is no {option.opts[0]} any more: {_INSTEAD}")

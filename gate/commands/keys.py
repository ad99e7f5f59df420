"""`gate keys`: keys that sign, and whose signatures count."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack, cast

import click

from gate.commands.options import FILE
from gate.commands.outcome import Outcome, machine_options
from gate.commands.status import Status

if TYPE_CHECKING:
    from gate.attestation.keys import PublicKey, Scheme
    from gate.attestation.trust import Role

_FOLDER = Path(".gate", "keys")


@click.group("keys", short_help="Make keys that sign, and say whose count.")
def command() -> None:
    """Make keys that sign verdicts, show them, and say whose signatures count.

    \b
    Examples:
      gate keys new ci
      gate keys show .gate/keys/ci.pem --json
      gate keys trust .gate/keys/ci.pub --trust trust.yaml --as measurer
      gate keys trust --trust trust.yaml --revoke 3f1c55aa09d1
    """


@command.command("new", short_help="Make a key.")
@click.argument("place", metavar="[NAME|PATH]", default="signing")
@click.option(
    "--scheme", type=click.Choice(("ed25519", "ecdsa")), default="ed25519", show_default=True,
    help="ECDSA (P-256) where others ask for it, as model-signing does.",
)  # fmt: skip
@machine_options
def _new(place: str, scheme: str) -> Outcome:
    """Make a key: NAME.pem in .gate/keys, or PATH; mode 0600, its public part beside it (.pub).

    Whoever can read the file can sign as you. Keep it where only the one who signs can read it; a
    key in a cloud's vault or in a token is used in place: --key awskms:…, see docs/attestation.md.

    \b
    Examples:
      gate keys new ci
      gate keys new /etc/gate/ci.pem --scheme ecdsa
    """
    from gate.attestation.keys import SigningKey

    is_name = Path(place).name == place and not Path(place).suffix
    path = _FOLDER / f"{place}.pem" if is_name else Path(place)
    key = SigningKey.make(path, scheme=cast("Scheme", scheme)).public
    public = path.with_suffix(".pub")
    lines = (
        f"made      {path}",
        f"public    {public}",
        f"key id    {key.key_id}",
        f"sign      --key {path}",
        f"trust     whoever relies on it runs gate keys trust {public} --trust FILE, with "
        "--as measurer where it signs verdicts and --as reviewer where it approves versions",
    )
    plain = {"path": str(path), "public_path": str(public), **_plain(key)}
    return Outcome(Status.DONE, plain, lambda console: console.print("\n".join(lines)))


@command.command("show", short_help="Show a key's public part, its id, and whose it is.")
@click.argument("place", metavar="URI|PATH")
@machine_options
def _show(place: str) -> Outcome:
    """Show the public part of a key: of a file (private or public), or in a vault.

    \b
    Examples:
      gate keys show .gate/keys/ci.pem
      gate keys show awskms:alias/gate --json
    """
    from gate.attestation.keys import read_public

    key = read_public(place)
    lines = (f"whose     {key.name}", f"key id    {key.key_id}", f"scheme    {key.scheme}",
             key.public.rstrip())  # fmt: skip
    return Outcome(Status.DONE, _plain(key), lambda console: console.print("\n".join(lines)))


class _Edit(TypedDict):
    """The options of `gate keys trust`, as parsed."""

    publics: tuple[str, ...]
    trust: Path
    roles: tuple[str, ...]
    name: str | None
    valid_from: str | None
    valid_until: str | None
    revoked: tuple[str, ...]


@command.command("trust", short_help="Say whose signatures count, and whose no more.")
@click.argument("publics", metavar="[PUB]...", nargs=-1)
@click.option(
    "--trust", type=FILE, required=True, metavar="FILE",
    help="YAML with a section 'trust:', or the trust itself. It is made where it is not there.",
)  # fmt: skip
@click.option(
    "--as", "roles", multiple=True, type=click.Choice(("measurer", "reviewer", "writer")),
    help="What they may say: what was measured and decided, what is approved, lines of the ledger. "
    "Repeatable.",
)  # fmt: skip
@click.option("--name", help="Whose key it is, for people. Default: the file's name.")
@click.option("--valid-from", metavar="TIME", help="From when it counts: 2026-01-31T12:00:00Z.")
@click.option("--valid-until", metavar="TIME", help="Until when it counts.")
@click.option(
    "--revoke", "revoked", multiple=True, metavar="KEYID",
    help="A key that counts no more, whatever it signed whenever. Repeatable.",
)  # fmt: skip
@machine_options
def _trust(**edit: Unpack[_Edit]) -> Outcome:
    """Edit, or make, a file of trust. Its comments stay; what would be no trust is not written.

    gate serve reads its file again at each look. To exchange a key: trust the new one, sign with
    it, and let the old one end (--valid-until) or revoke it.

    \b
    Examples:
      gate keys trust ci.pub --trust trust.yaml --as measurer --name "CI of digits"
      gate keys trust ann.pub bob.pub --trust trust.yaml --as reviewer
      gate keys trust old.pub --trust trust.yaml --as measurer --valid-until 2027-01-31
      gate keys trust --trust trust.yaml --revoke 3f1c55aa09d1
    """
    from gate.attestation.keys import read_public
    from gate.attestation.trust_file import EditedTrust, KeyTerms

    _check(edit)
    file = EditedTrust(edit["trust"])
    keys = [read_public(place) for place in edit["publics"]]
    roles = [cast("Role", f"{role}s") for role in dict.fromkeys(edit["roles"])]
    terms = KeyTerms(edit["name"], edit["valid_from"], edit["valid_until"])
    for key in keys:
        file.trust(key, roles, terms)
    revoked = [file.revoke(key_id) for key_id in edit["revoked"]]
    made = file.save()
    lines = [
        f"trusted   {edit['name'] or key.name} ({key.short}) as {', '.join(edit['roles'])}"
        for key in keys
    ]
    lines += [f"revoked   {key_id}" for key_id in revoked]
    listed = (("measurer", made.measurers), ("reviewer", made.reviewers), ("writer", made.writers))
    counts = ", ".join(f"{len(keys)} {role}{'s' * (len(keys) != 1)}" for role, keys in listed)
    lines.append(f"written   {edit['trust']}: {counts}")
    plain = {
        "path": str(edit["trust"]),
        "trusted": [_plain(key) for key in keys],
        "as": list(roles),
        "revoked": revoked,
    }
    return Outcome(Status.DONE, plain, lambda console: console.print("\n".join(lines)))


def _check(edit: _Edit) -> None:
    """Refuse what would do nothing, or not what it looks like."""
    if not edit["publics"] and not edit["revoked"]:
        raise click.UsageError("nothing to do. Name public keys with --as, or --revoke KEYID.")
    if edit["publics"] and not edit["roles"]:
        raise click.UsageError("say what the keys may do: --as measurer, reviewer or writer.")
    if edit["name"] and len(edit["publics"]) != 1:
        raise click.UsageError("--name is for one key. Trust them one by one.")
    if not edit["publics"] and (edit["roles"] or edit["valid_from"] or edit["valid_until"]):
        raise click.UsageError("--as and --valid-… are for keys: name their public files.")


def _plain(key: PublicKey) -> dict[str, str]:
    return {"name": key.name, "key_id": key.key_id, "scheme": key.scheme, "public": key.public}

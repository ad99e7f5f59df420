"""`gate keys new`, `show`, `trust`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from gate.commands.result import CommandResult, machine_options, text_result

if TYPE_CHECKING:
    from gate.signing.keys import PublicKey, Scheme


@click.group("keys", short_help="Create signing keys and trust entries.")
def command() -> None:
    """Create keys that sign verdicts, show them, and print trust entries for them.

    \b
    Examples:
      gate keys new ci
      gate keys show .gate/keys/ci.pem --json
      gate keys trust .gate/keys/ci.pub --as measurer
    """


@command.command("new", short_help="Create a key.")
@click.argument("location", metavar="[NAME|PATH]", default="signing")
@click.option(
    "--scheme", type=click.Choice(("ed25519", "ecdsa")), default="ed25519", show_default=True,
    help="ecdsa (P-256) for tools that require it, such as model-signing.",
)  # fmt: skip
@machine_options
def _new(location: str, scheme: str) -> CommandResult:
    """Create a key: NAME.pem in .gate/keys, or PATH, with mode 0600. The public key goes into a
    .pub file in the same folder.

    Anyone who can read the private key can sign as you, so restrict access to the signer. Keys in a
    cloud vault or hardware token stay there: use --key awskms:…, see docs/attestation.md.

    \b
    Examples:
      gate keys new ci
      gate keys new /etc/gate/ci.pem --scheme ecdsa
    """
    from gate.signing.keys import SigningKey

    is_name = Path(location).name == location and not Path(location).suffix
    path = Path(".gate", "keys", f"{location}.pem") if is_name else Path(location)
    key = SigningKey.make(path, scheme=cast("Scheme", scheme)).public
    public = path.with_suffix(".pub")
    return text_result(
        {"path": str(path), "public_path": str(public), **_plain(key)},
        f"created   {path}",
        f"public    {public}",
        f"key id    {key.key_id}",
        f"sign      --key {path}",
        f"trust     gate keys trust {public} prints the entry for a trust file: use "
        "--as measurer if the key signs verdicts, --as reviewer if it approves versions",
    )


@command.command("show", short_help="Show a public key with its ID and name.")
@click.argument("location", metavar="URI|PATH")
@machine_options
def _show(location: str) -> CommandResult:
    """Show the public key of a file (private or public), or of a key in a vault.

    \b
    Examples:
      gate keys show .gate/keys/ci.pem
      gate keys show awskms:alias/gate --json
    """
    from gate.signing.keys import read_public

    key = read_public(location)
    lines = (f"name      {key.name}", f"key id    {key.key_id}", f"scheme    {key.scheme}")
    return text_result(_plain(key), *lines, *key.public.splitlines())


@command.command("trust", short_help="Print the entry that trusts a key.")
@click.argument("publics", metavar="PUB...", nargs=-1, required=True)
@click.option(
    "--as", "roles", multiple=True, required=True,
    type=click.Choice(("measurer", "reviewer", "writer")),
    help="What the keys may sign. measurer: evidence and decisions; reviewer: approvals; writer: "
    "ledger entries. Repeatable.",
)  # fmt: skip
@machine_options
def _trust(publics: tuple[str, ...], roles: tuple[str, ...]) -> CommandResult:
    """Print an entry for the section 'trust:' of a trust file.

    \b
    Examples:
      gate keys trust ci.pub --as measurer
      gate keys trust ann.pub bob.pub --as reviewer
    """
    from gate.signing.keys import read_public

    keys = [read_public(path) for path in publics]
    lines = ["trust:"]
    for role in dict.fromkeys(roles):
        lines.append(f"  {role}s:")
        for key in keys:
            lines += [f"    - name: {key.name}", f"      key_id: {key.key_id}", "      public: |"]
            lines += [f"        {line}" for line in key.public.splitlines()]
    plain = {"trusted": [_plain(key) for key in keys], "as": [f"{role}s" for role in roles]}
    return text_result(plain, *lines)


def _plain(key: PublicKey) -> dict[str, str]:
    return {"name": key.name, "key_id": key.key_id, "scheme": key.scheme, "public": key.public}

"""Options that `gate serve` and `gate webhooks` share."""

from __future__ import annotations

import click

from gate.commands.options import FILE
from gate.service.keyring import SECRETS_VARIABLE

SECRET_FILE = click.option(
    "--secret-file",
    type=FILE,
    envvar="GATE_SECRET_FILE",
    show_envvar=True,
    help="One secret in a line, the newest first, mode 0600. "
    f"Default: those in {SECRETS_VARIABLE}.",
)

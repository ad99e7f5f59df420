"""`gate reject`: a reviewer signs that a version must not serve.

A tag alone would do; it is signed so that the ledger says whose no it is.
"""

from __future__ import annotations

from typing import Unpack

import click

from gate.commands.outcome import Outcome, machine_options
from gate.commands.reviewed import ReviewRequest, review_options, signed_review


@click.command("reject", short_help="Sign that a version must not serve.")
@review_options
@machine_options
def command(**request: Unpack[ReviewRequest]) -> Outcome:
    """Sign that VERSION of the registered model NAME must not serve. That is final for its bytes.

    The signature says whose word it is; the tag gate.review is set to rejected as well, so that it
    is heard whatever the policy asks of reviewers, and whether the key is trusted or not. Exit code
    0: signed; 2: it could not be.

    \b
    Examples:
      gate reject digits 7 --key ~/.keys/alice.pem --comment "sevens read as ones"
      gate reject digits 7 --key awskms:alias/reviews --json
    """
    return signed_review("rejected", **request)

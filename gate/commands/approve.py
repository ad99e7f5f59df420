"""`gate approve`: a reviewer signs that a version may serve."""

from __future__ import annotations

from typing import Unpack

import click

from gate.commands.outcome import Outcome, machine_options
from gate.commands.reviewed import ReviewRequest, review_options, signed_review


@click.command("approve", short_help="Sign that a version may serve.")
@review_options
@machine_options
def command(**request: Unpack[ReviewRequest]) -> Outcome:
    """Sign that VERSION of the registered model NAME may serve, where the policy says
    review: signed.

    Exactly this file, this decision and this moment are signed; the signature goes into a tag of
    the version, which takes the right to edit the model and neither ledger nor service. Whether
    it counts, the service decides by its own trust: it promotes when enough of its reviewers have
    approved. Exit code 0: signed; 2: it could not be, or there is no PASS to approve.

    \b
    Examples:
      gate approve digits 7 --key ~/.keys/alice.pem
      gate approve digits 7 --key awskms:alias/reviews --comment "looked at the sevens"
      gate approve digits 7 --key ~/.keys/alice.pem --sha256 9f86d0... --json
    """
    return signed_review("approved", **request)

"""What the list of runs shows of a judgement: the run's name, its status, its tags."""

from __future__ import annotations

from gate.decision.checks import Verdict
from gate.storage.digest import Digest
from gate.story.story import Headline
from gate.tracking.page import RunStatus

_DIGITS = 6
_NOTHING_TO_NAME = ("passed", "waived")


def unjudged_name(done: str, sha256: Digest) -> str:
    """Of a run whose file waits for its verdict: `gate exported 4d87ab`."""
    return f"gate {done} {sha256.hex[:_DIGITS]}"


def judged_name(verdict: Verdict, sha256: Digest, headline: Headline) -> str:
    """`gate PASS 8de109`, `gate FAIL 4d87ab layer3.0.conv1`: who is to blame, else what kind of
    fault it is."""
    name = f"gate {verdict} {sha256.hex[:_DIGITS]}"
    if verdict is Verdict.PASS:
        return name
    kind = "" if headline.cause in _NOTHING_TO_NAME else headline.cause.replace("_", " ")
    return f"{name} {headline.blamed or kind}".rstrip()


def status_of(verdict: Verdict) -> RunStatus:
    """FINISHED only for a PASS: a green tick says that the file is good."""
    return "FINISHED" if verdict is Verdict.PASS else "FAILED"


def headline_tags(headline: Headline) -> dict[str, object]:
    """What became of the file and why, for columns and filters of the list of runs."""
    return {
        "gate.verdict": headline.verdict,
        "gate.headline": headline.sentence[:5000],
        "gate.cause": headline.cause,
        "gate.blamed": headline.blamed and headline.blamed[:5000],
    }

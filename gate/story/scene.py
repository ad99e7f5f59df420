"""What an account is made of: a group of checks with its evidence, and how its texts read."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gate.decision.checks import CheckResult, Verdict
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation
from gate.story.group import Group, worst_of
from gate.story.wording import printable
from gate.story.words import measure

_LONGEST = 240
"""Characters of a part of a sentence: what libraries say of a failure has no end."""
_WHOLE = 1000
"""Characters of a sentence at most."""


@dataclass(frozen=True)
class Account:
    """What one group of checks means."""

    blamed: str | None
    sentence: str
    remedy: str | None

    def printable(self) -> Account:
        """The same, each on one line and not without end, whatever names are in it."""
        return Account(
            self.blamed and short(self.blamed),
            clean(self.sentence)[:_WHOLE],
            self.remedy and printable(self.remedy),
        )


@dataclass(frozen=True)
class Scene:
    """What an account is made of."""

    group: Group
    evidence: Evidence
    explanation: Explanation

    @property
    def shown(self) -> CheckResult:
        """The check that shows the cause best."""
        return self.group.ordered[0]

    @property
    def number(self) -> str:
        """The farthest noise ratio beyond its bound, else the number of the first check, named
        where its unit does not say what it is."""
        failed = [c for c in self.group.checks if c.verdict is Verdict.FAIL]
        best = worst_of(failed, "noise_ratio") or worst_of(failed, "noise_") or self.shown
        text = measure(best)
        return text if not text or best.name.startswith("noise_") else f"{best.name} {text}"

    @property
    def where(self) -> str:
        """The runtimes on which it shows."""
        return ", ".join(dict.fromkeys(c.runtime for c in self.group.ordered if c.runtime))


def with_number(text: str, number: str) -> str:
    """The sentence with its number at the end, where there is one."""
    return clean(f"{text.rstrip('.')}: {number}" if number else text)


def broken(failure: str) -> str:
    """What ONNX Runtime raised, without how it counts and where in its source that was."""
    text = re.sub(r"^\w+: \[ONNXRuntimeError\] : \d+ : \w+ : (?:Fatal error: )?", "", failure)
    return re.sub(r"/\S+/core/\S+:\d+ .*?\) (?:const )?(?=\S)", "", text)


def capital(text: str) -> str:
    """The text with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]


def clean(text: str) -> str:
    """One line without control characters or a full stop at its end."""
    return printable(text).replace("<=", "≤").replace(">=", "≥").rstrip(". ")


def short(text: str) -> str:
    """One line, cut where it is too long."""
    line = printable(text).rstrip(".")
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"

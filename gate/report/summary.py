"""The summary of a CI's step, and the comment on a pull request: the story as Markdown."""

from __future__ import annotations

from gate.decision.checks import Verdict
from gate.report.ci import CiResult, Colour
from gate.report.markdown import describe, literal

LIMIT = 60_000
"""Bytes. GitHub takes 65 536 characters of a comment, and 1 MiB of a step's summary."""
_MARKS = {"passed": "✅", "rejected": "❌", "not judged": "⚠️"}
_VERDICTS = {"passed": Verdict.PASS, "rejected": Verdict.FAIL, "not judged": Verdict.ERROR}
_NOTHING: dict[Colour, str] = {
    "passed": "Nothing was decided.",
    "rejected": "It was rejected before anything was measured (exit code 1).",
    "not judged": "Nothing was decided (exit code 2): this is neither a pass nor a rejection.",
}
"""What there is to say where there is no story."""
_CUT = "\n(What does not fit is left out here.)\n"


def summary(result: CiResult) -> str:
    """Markdown text of at most `LIMIT` bytes: the verdict, what came of it, then the story: cause,
    findings, what changed against the champion, runtimes, next steps."""
    about = f" ({literal(result.subject)})" if result.subject else ""
    lines = [f"## {_MARKS[result.colour]} parity-gate: {_word(result)}{about}", ""]
    if result.story is None:
        lines += [f"`{result.title}`: {literal(result.reason)}", "", _NOTHING[result.colour], ""]
        return _cut("\n".join(lines))
    if result.sentence:
        lines += [f"`{result.title}`: **{literal(result.sentence)}**", ""]
    return _cut("\n".join([*lines, describe(result.story, result.links)]))


def _word(result: CiResult) -> str:
    """The verdict; of a passed file that was refused all the same, that first."""
    if result.story is None:
        return "could not judge" if result.colour == "not judged" else result.colour
    as_decided = result.verdict is _VERDICTS[result.colour]
    return result.verdict if as_decided else f"{result.colour}, the verdict is {result.verdict}"


def _cut(text: str) -> str:
    """Whole lines from the beginning, as many as there is room for."""
    if len(text.encode()) <= LIMIT:
        return text
    room = LIMIT - len(_CUT.encode())
    kept = text.encode()[:room].decode(errors="ignore")
    return kept[: kept.rfind("\n") + 1] + _CUT

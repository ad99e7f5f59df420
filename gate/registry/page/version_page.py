"""What people read on a version's page follows the ledger: status, verdict, answer to a reviewer.

It decides nothing. Whoever wrote a line brings the pages of its versions up to date afterwards, and
so does the service for what others left undone. A page that can't be written now is weather: no
move, and no line, waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from gate.decision.checks import Verdict
from gate.errors import GateError, RegistryUnavailable, ResourceGone
from gate.ledger.history import History
from gate.registry.page import reviewer
from gate.registry.page.status_line import Fate, with_status
from gate.registry.port import CANDIDATE, Tag, Version
from gate.registry.registered_model import RegisteredModel

REJECTED_VERDICT = "REJECTED by review"
"""What `gate.verdict` says then; that it passed stands in the ledger."""
_REFUSED = "REFUSED"
"""What it begins with, of a version that was refused; what whoever handed it in says follows."""
_ANSWER_LIMIT = 1000
"""Characters of `gate.review_result`."""
_log = logging.getLogger(__name__)


def refresh(model: RegisteredModel, versions: Iterable[str | None]) -> tuple[str, ...]:
    """Bring the pages of these versions up to date; what says already what it should is left alone.
    The caller is alone (`gate.registry.champion`).

    Gives those that could not be because the registry is away; what else went wrong is logged.
    """
    wanted = tuple(dict.fromkeys(version for version in versions if version is not None))
    for place, number in enumerate(wanted):
        try:
            _refresh(model, number, model.history())
        except ResourceGone:
            continue
        except GateError as error:
            _log.warning(
                "the page of version %s of %s is out of date: %s", number, model.name, error
            )
            if isinstance(error, RegistryUnavailable):  # the others neither
                return wanted[place:]
    return ()


def answer(model: RegisteredModel, version: Version, text: str) -> None:
    """Tell the reviewer; once. Raises the RegistryErrors."""
    _set(model, version, Tag.REVIEW_RESULT, text[:_ANSWER_LIMIT])


def refused_as(claim: str) -> str:
    """What `gate.verdict` says of a refused version, of which it said this before."""
    return f"{_REFUSED} (see {Tag.REFUSED}); handed in as {claim}"


def _refresh(model: RegisteredModel, number: str, history: History) -> None:
    fate = Fate.of(history, number)
    if fate is None:
        return
    page = model.registry.version(model.name, number)
    if fate.kind == "rejected" and model.alias(CANDIDATE) == number:
        model.registry.delete_alias(model.name, CANDIDATE)
    verdict = _verdict(fate, page.tags.get(Tag.VERDICT))
    if verdict is not None:
        _set(model, page, Tag.VERDICT, verdict)
    if fate.answer is not None and reviewer.speaks(page.tags, model.reviews.tag):
        answer(model, page, fate.answer)
    text = with_status(page.description, fate.status_line(model.reviews))
    if text != page.description:
        model.registry.set_description(model.name, number, text)


def _verdict(fate: Fate, shown: str | None) -> str | None:
    """What `gate.verdict` has to say; None: whatever it says. A refused version's says PASS when
    it comes, by whoever handed it in: that stays to be read, as his word."""
    claim = next((each.value for each in Verdict if shown in (each, refused_as(each))), None)
    match fate.kind:
        case "rejected":
            return REJECTED_VERDICT
        case "refused":
            return _REFUSED if claim is None else refused_as(claim)
        case "waits" | "champion" if claim is not None:  # it was refused before, and came again
            return claim
    return None


def _set(model: RegisteredModel, version: Version, key: str, value: str) -> None:
    if version.tags.get(key) != value:
        model.registry.set_tag(model.name, version.number, key=key, value=value)

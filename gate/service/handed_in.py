"""Hand-ins: what somebody made the candidate without the ledger is judged here, and by nothing that
it says of itself.

Whoever hands in may write to the registry: tags, aliases, records and bytes are his. So a trusted
key has to vouch for evidence and verdict, for all bytes, and for this model in this registry; then
the service decides anew, from the evidence and by its own policy, trust and clock.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from gate.attestation.trust import Trust
from gate.errors import (
    DigestMismatch,
    EvidenceError,
    LimitExceeded,
    MismatchUnconfirmed,
    OnnxFileError,
    RegistryError,
    Untrusted,
)
from gate.ledger.entry import LedgerEntry, now
from gate.ledger.history import History
from gate.policy.policy import Policy
from gate.registry.champion import move
from gate.registry.comparison.by_records import compared_by_records
from gate.registry.comparison.compared import comparison_in, outdated
from gate.registry.comparison.incumbent import champion_recorded
from gate.registry.download import Stated
from gate.registry.judged import GoldenFolder
from gate.registry.objection import objection_from_afar
from gate.registry.page import reviewer
from gate.registry.page.status_line import (
    MARK,
    TOO_EARLY,
    UNTRUSTING,
    Fate,
    is_waiting_for_service,
    unjudged,
    way_back,
    with_status,
)
from gate.registry.page.version_page import refresh
from gate.registry.port import CANDIDATE, CHAMPION, GOLDEN, Tag, Version
from gate.registry.proof import ExpectedFiles
from gate.registry.records import Records, evidence_beside
from gate.registry.registered_model import RegisteredModel
from gate.registry.terms import ReadTrust, Terms, judge, release_beside
from gate.registry.vouching import stated
from gate.service.port import Taken
from gate.storage.foreign import mismatch_of
from gate.storage.temporary import temporary_folder

_TAIL = 4000
"""Characters of a tag's value; databases other than SQLite refuse more than 5000."""
_LOOKS = 3
"""At a candidate that is another one whenever it was judged; the next event brings the rest."""
_log = logging.getLogger(__name__)


def judge_handed_in(model: RegisteredModel, policy: Policy, *, trust: ReadTrust) -> list[Taken]:
    """Judge the candidate, if no line says yet what became of it: it becomes champion, or waits for
    its review, or is refused, once, with a line, a tag and the reason on its page. Where nobody is
    trusted, or what came may be an answer of a store in trouble, it only says so there.

    Raises the RegistryErrors, of them MismatchUnconfirmed, PolicyError, EvidenceError and
    StorageError where nothing can be said now: then it is looked at again, and nothing is refused.
    """
    for _ in range(_LOOKS):
        number, history = model.alias(CANDIDATE), model.history()
        if number is None:
            return []
        if number == model.alias(CHAMPION):  # of a champion the guard decides
            if not history.passed_any:
                _explain_first(model, number)
            return []
        version = model.registry.version(model.name, number)
        if history.judged(number, made_at=version.made_at):
            fate = Fate.of(history, number)
            if fate is not None and fate.kind not in ("champion", "waits"):
                _log_once(model.name, number, fate.status_line(model.reviews))
            return []
        terms = Terms.now(policy, trust)
        if terms.trust is None:
            _explain(model, version, UNTRUSTING)
            return []
        try:
            taken = _HandIn(model, version, history, terms, terms.trust).act()
        except MismatchUnconfirmed as error:
            # Somebody may have made it look so: then nothing ever confirms it, and nobody is told.
            _explain(model, version, unjudged(str(error).partition(". ")[0]))
            raise
        if taken is not None:
            return [taken]
    return []


def _explain_first(model: RegisteredModel, number: str) -> None:
    """Say why nothing comes of a champion of which no line tells. By another ledger it may have
    passed: then its page says so, and stays."""
    version = model.registry.version(model.name, number)
    if is_waiting_for_service(version.description):
        _explain(model, version, TOO_EARLY)


@functools.lru_cache(maxsize=1024)
def _log_once(model: str, number: str, status: str) -> None:
    _log.info(
        "version %s of %s is the candidate, and was judged before: %s %s.",
        number, model, status.removeprefix(MARK), way_back(model, number),
    )  # fmt: skip


def _explain(model: RegisteredModel, version: Version, line: str) -> None:
    """Say on its page why nothing comes of it; that it can't be said now stops nothing."""
    text = with_status(version.description, line)
    if text == version.description:
        return
    try:
        model.registry.set_description(model.name, version.number, text)
    except RegistryError as error:
        _log.warning("the page of version %s is out of date: %s", version.number, error)


@dataclass(frozen=True)
class _HandIn:
    """A candidate that is judged by these terms, of which the trust is given."""

    model: RegisteredModel
    version: Version
    history: History
    terms: Terms
    trust: Trust

    def act(self) -> Taken | None:
        """None: the candidate is another one meanwhile."""
        model, number = self.model, self.version.number
        line = self._line()
        try:
            with temporary_folder() as folder:
                expected = Stated(lambda path: ExpectedFiles.of(self._stated(path)))
                line, problem = model.read(number, expected, self._judged, into=folder)
        except (DigestMismatch, EvidenceError, LimitExceeded, OnnxFileError) as error:
            problem = str(error)
        if line.sha256 is not None and problem is None:
            problem = self._objection(line)
        if model.alias(CANDIDATE) != number:
            return None
        return self._take(line) if problem is None else self._refuse(line, problem)

    def _line(self) -> LedgerEntry:
        """A line about the version that says nothing of its bytes."""
        version = self.version
        line = self.model.entry("passed", "handed in", version=version.number)
        return line.model_copy(update={"made_at": version.made_at, "run_id": version.run_id})

    def _stated(self, path: Path) -> LedgerEntry:
        """With what trusted keys say of it. Raises EvidenceError, StorageError."""
        with mismatch_of(f"what was handed in as version {self.version.number}"):
            try:
                fields = stated(
                    path,
                    model=self.model.name,
                    trust=self.trust,
                    registries=self.model.identities(),
                    now=self.terms.at,
                )
            except Untrusted as error:
                raise EvidenceError(str(error)) from error
        return self._line().model_copy(update=fields)

    def _judged(self, path: Path) -> tuple[LedgerEntry, str | None]:
        """Of proven files: the line, and what the terms have against them."""
        line = self._compared(self._stated(path), path)
        problem = judge(path, self.model, vouched=line, terms=self.terms)
        if problem is not None:
            return line, problem
        records = Records.beside(path, evidence=line.evidence_sha256)
        release = release_beside(path, records, name=self.model.name, twin=line.twin)
        if line.golden_sha256 is not None:
            golden = GoldenFolder.open(path.parent / GOLDEN, sha256=line.golden_sha256)
            release = replace(release, golden=golden)
        return line.model_copy(update={"extent": release.extent}), None

    def _compared(self, line: LedgerEntry, path: Path) -> LedgerEntry:
        """With the service's own comparison, where whoever hands in made none. That what serves
        does not come now is no word on this one: raises MismatchUnconfirmed then."""
        if self.terms.policy.incumbent is None or line.compared_with is not None:
            return line
        with mismatch_of(f"what was handed in as version {self.version.number}"):
            evidence = evidence_beside(path, sha256=line.evidence_sha256)
        found = compared_by_records(champion_recorded(self.model), evidence)
        return line.model_copy(update={"incumbent": found})

    def _objection(self, line: LedgerEntry) -> str | None:
        """What the ledger and reviewers have against these bytes, or its comparison."""
        objection = objection_from_afar(self.model, self.history, line)
        if objection is not None or self.terms.policy.incumbent is None:
            return objection
        return outdated(comparison_in(line), self.model.alias(CHAMPION), self.history)

    def _take(self, line: LedgerEntry) -> Taken:
        model, number, champion = self.model, self.version.number, self.model.alias(CHAMPION)
        reason = f"handed in, signed by {self._names(line)}; it passes by the policy in force"
        if line.incumbent is not None:
            reason += (
                f", compared by the records of both with version {line.incumbent.version or 'none'}"
            )
        # A no is final for these bytes by the line of the review, which comes next.
        if self.terms.policy.review != "automatic" or reviewer.rejects(
            self.version.tags, model.reviews.tag
        ):
            reason += ", and waits for review"
            model.write("passed", reason, version=number, previous=champion, about=line)
            refresh(model, (number,))
            return Taken("hand_in", "passed", number, reason)
        move(model, model.entry("promoted", reason, version=number, previous=champion, about=line))
        return Taken("hand_in", "promoted", number, reason)

    def _refuse(self, line: LedgerEntry, problem: str) -> Taken:
        model, number = self.model, self.version.number
        # Before the line, so that it is said twice rather than never; and what is handed in again
        # becomes another version by it.
        if not self.version.tags.get(Tag.REFUSED, "").endswith(problem[-_TAIL:]):
            note = problem if len(problem) <= _TAIL else f"…{problem[-_TAIL:]}"
            value = f"{now()}: {note}"
            model.registry.set_tag(model.name, number, key=Tag.REFUSED, value=value)
        reason = f"handed in, and refused: {problem}"
        model.write("refused", reason, version=number, about=line)
        refresh(model, (number,))
        return Taken("hand_in", "refused", number, reason)

    def _names(self, line: LedgerEntry) -> str:
        keys = [key for key in self.trust.measurers if key.key_id in line.signers]
        return ", ".join(f"{key.name} ({key.short})" for key in keys)

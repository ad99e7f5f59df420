"""Sessions of the file as it is served, with some optimisers off: few, and not for long."""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gate.errors import EvidenceError, GateError, describe_failure
from gate.localisation.optimisers.judge import OutputJudge
from gate.onnxfile.candidate import Candidate
from gate.onnxfile.session import open_session, quiet_run, session_options, tell_all
from gate.parity.statistics.output import Array
from gate.policy.ort_options import OrtSetup

SESSIONS = 32
"""At most for one file: real faults took 7 to 15."""
LIMIT_S = 30.0
"""No session is opened later: ten of a resnet18 take 1.6 s of processor time."""


class Spent(EvidenceError):
    """As many sessions were opened, or as long, as one file may have."""


@dataclass(frozen=True)
class TrialOutcome:
    """What one session did."""

    agrees: bool
    failure: str | None = None
    """What ONNX Runtime raised; None: it answered."""


class OptimiserTrials:
    """Opens one session after the other and remembers what each did."""

    def __init__(
        self,
        candidate: Candidate,
        setup: OrtSetup,
        judge: OutputJudge,
        *,
        threads: int = 1,
        deterministic: bool = False,
    ) -> None:
        """`setup`: with the optimisations that are doubted. `threads`, `deterministic`: as of
        `session_options`. Raises DigestMismatch, StorageError."""
        self.setup = setup
        self._threads, self._deterministic = threads, deterministic
        self._model = candidate.loadable()
        self._judge = judge
        self._until = time.monotonic() + LIMIT_S
        self._outcomes: dict[tuple[str, frozenset[str]], TrialOutcome] = {}
        self.sessions = 0

    def heals(self, off: Set[str]) -> bool:
        """Whether the answer is right without these. Raises Spent, EvidenceError."""
        return self.outcome(off=off).agrees

    @property
    def healing(self) -> frozenset[str] | None:
        """The fewest optimisers that were off together when the answer was right; None: it never
        was at the setup's own level."""
        own = [o for (level, o), done in self._outcomes.items() if self._is_own(level, done)]
        return min(own, key=len, default=None)

    def outcome(
        self, *, off: Set[str] = frozenset(), level: str | None = None,
        log: list[str] | None = None,
    ) -> TrialOutcome:  # fmt: skip
        """What the session does. `log`: gets all that ONNX Runtime says while it opens.

        Raises Spent, and EvidenceError where the provider doesn't load.
        """
        key = (level or self.setup.optimization, frozenset(off))
        if key not in self._outcomes or log is not None:
            self._outcomes[key] = self._tried(*key, log)
        return self._outcomes[key]

    def write(self, path: Path, *, off: Set[str]) -> None:
        """Write the graph that ONNX Runtime makes. Raises as `outcome`, and what it raises."""
        setup, options = self._opened_by(self.setup.optimization, off)
        options.optimized_model_filepath = str(path)
        open_session(self._model, options, setup)

    def _tried(self, level: str, off: frozenset[str], log: list[str] | None) -> TrialOutcome:
        setup, options = self._opened_by(level, off)
        if log is not None:
            tell_all(options)
        try:
            session = open_session(self._model, options, setup, log=log)
            return TrialOutcome(self._judge.agrees(lambda feed: _answers(session, feed)))
        except GateError:
            raise
        except Exception as error:  # of ONNX Runtime, without a common base
            return TrialOutcome(False, describe_failure(error))

    def _opened_by(self, level: str, off: Set[str]) -> tuple[OrtSetup, Any]:
        if self.sessions >= SESSIONS:
            raise Spent(f"{SESSIONS} sessions did not tell")
        if time.monotonic() > self._until:
            raise Spent(f"{LIMIT_S:.0f} s did not tell")
        self.sessions += 1
        settings = self.setup.settings
        both = tuple(sorted({*settings.disabled_optimizers, *off}))
        setup = replace(
            self.setup,
            optimization=level,
            settings=settings.model_copy(update={"disabled_optimizers": both}),
        )
        return setup, session_options(
            setup, threads=self._threads, deterministic=self._deterministic
        )

    def _is_own(self, level: str, outcome: TrialOutcome) -> bool:
        return outcome.agrees and level == self.setup.optimization


def _answers(session: Any, feed: Mapping[str, Array]) -> dict[str, Array]:
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed), quiet_run()), strict=True))

"""The inputs that a search tried: which way the model took, and whether its trace agrees."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gate.errors import GateError
from gate.parity.probes.traced import Traced, disagree
from gate.parity.probes.watch import Watch
from gate.parity.stand import Stand
from gate.runtimes.runtime import Batch


@dataclass(frozen=True)
class InputTrial:
    """One input that was tried."""

    name: str
    path: tuple[bool, ...]
    """The branches that the model's code took."""
    margins: tuple[float | None, ...]
    """How near each of them is to flip."""
    reads: int
    """Values that the code took out of tensors, those of branches included."""
    shapes: tuple[tuple[int, ...], ...]
    differs: bool
    batch: Batch | None
    """The input, where the trace disagrees and it is no known probe."""


class InputTrials:
    """Tries inputs as long as the budget lasts. The first one is the example of the trace."""

    def __init__(
        self, stand: Stand, traced: Traced, *, computed: Collection[str], budget: int
    ) -> None:
        """`computed`: names of probes that are computed anyway. `budget`: inputs."""
        self._stand = stand
        self._traced = traced
        self._computed = computed
        self._by_name: dict[str, InputTrial] = {}
        self.budget = budget

    def attempt(self, name: str, batch: Batch) -> InputTrial | None:
        """Run the model and, unless it can't make a difference, the trace.

        None without budget, or where that name was tried before.
        """
        if len(self._by_name) >= self.budget or name in self._by_name:
            return None
        shapes = tuple(array.shape for array in batch.values())
        if self._is_blind(shapes):
            watch, computed = Watch(), True
        else:
            watch, computed = self._traced.watched(batch)
        branches = [read for read in watch.reads if read.branch is not None]
        path, reads = watch.path, len(watch.reads)
        harmless = name not in self._computed and self._harmless(path, reads, shapes)
        differs = computed and not harmless and self._differs(batch)
        kept = batch if differs and name not in self._computed else None
        margins = tuple(read.margin for read in branches)
        self._by_name[name] = InputTrial(name, path, margins, reads, shapes, differs, kept)
        return self._by_name[name]

    def __len__(self) -> int:
        """Inputs that were tried."""
        return len(self._by_name)

    @property
    def example(self) -> InputTrial:
        """The first one."""
        return next(iter(self._by_name.values()))

    @property
    def different(self) -> list[InputTrial]:
        """Those on which model and trace disagree."""
        return [trial for trial in self._by_name.values() if trial.differs]

    @property
    def silent(self) -> bool:
        """True if the model's code took no value out of its tensors so far."""
        return not any(trial.reads for trial in self._by_name.values())

    def flipped(self, branch: int) -> bool:
        """True if some input took the example's branch of that number the other way."""
        taken = self.example.path[branch]
        return any(
            trial.path[branch] != taken
            for trial in self._by_name.values()
            if self._reaches(trial, branch)
        )

    def margin(self, name: str, branch: int) -> float | None:
        """How near that input came to flipping; None if it came not to this branch."""
        trial = self._by_name.get(name)
        return trial.margins[branch] if trial and self._reaches(trial, branch) else None

    def _reaches(self, trial: InputTrial, branch: int) -> bool:
        before = self.example.path[:branch]
        return trial.path[:branch] == before and len(trial.path) > branch

    def _harmless(
        self, path: tuple[bool, ...], reads: int, shapes: tuple[tuple[int, ...], ...]
    ) -> bool:
        """True where only branches could make a difference, and all are as in the example."""
        if not self._by_name or reads != len(path) or not reads:
            return False
        return (path, shapes) == (self.example.path, self.example.shapes)

    def _is_blind(self, shapes: tuple[tuple[int, ...], ...]) -> bool:
        """True where there is nothing to watch: code that took no value out of tensors of these
        shapes can't know that it got others."""
        if not self._by_name:
            return False
        example = self.example
        return not example.reads and shapes == example.shapes and not self._traced.warned

    def _differs(self, batch: Batch) -> bool:
        """True if the trace gives another answer; what the model refuses has none. The model runs
        without the watch, under which some of PyTorch's modules take a slower way with other
        roundings."""
        try:
            eager = self._stand.answers.reference(batch)
        except GateError:
            return False
        try:
            return disagree(eager, self._traced.run(batch))
        except Exception:  # whatever the trace can't compute and the model can
            return True

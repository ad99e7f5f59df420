"""All that is to be measured, the most important first: what a time limit cuts off is the least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from benchmarks.corpus.correct import CORRECT_PAIRS
from benchmarks.corpus.entry import Entry
from benchmarks.corpus.registry import ENTRIES
from benchmarks.cuda.cell import TESTS, Cell, Job
from benchmarks.cuda.device import BASELINE, Role
from benchmarks.cuda.setting import CORPUS, ONE_SWITCH, SETTINGS, TWO_SWITCHES
from benchmarks.cuda.subjects import MODELS

_SLICE = 8
"""Entries of one architecture in a job: enough to share the model, few enough to be shared out."""
_BY_FILE: tuple[Role, ...] = (BASELINE, "ort-cuda", "ort-cuda-optimized")
_QUICK_MODELS = ("grouped",)
_QUICK_ENTRIES = (
    "correct/points/direct-17",
    "correct/vit/direct-17",
    "fault/norm-epsilon/epsilon-of-pytorch-vit-norm/*",
    "fault/no-model/empty-*",
)


@dataclass(frozen=True)
class Phase:
    """Jobs of one importance."""

    title: str
    jobs: tuple[Job, ...]
    together: bool = False
    """Whether several workers may share them: not where latency is measured."""

    @property
    def cells(self) -> list[Cell]:
        return [cell for job in self.jobs for cell in job.cells()]


@dataclass(frozen=True)
class Plan:
    """Phases in order of importance, and whether the tests run."""

    phases: tuple[Phase, ...]
    tests: bool

    @property
    def cells(self) -> list[Cell]:
        return [cell for phase in self.phases for cell in phase.cells]

    @classmethod
    def from_names(cls, only: Sequence[str] = (), *, quick: bool = False) -> Plan:
        """`only`: cells by name, as patterns of the shell; `quick`: the smallest model and a few
        files of the corpus."""
        phases = [
            Phase("the default settings", _matrix(("default",), quick)),
            Phase("models of the corpus", _models_of_corpus(quick), together=True),
            Phase("correct files of the corpus", _corpus(CORRECT_PAIRS, quick), together=True),
            Phase("one switch", _matrix(ONE_SWITCH, quick)),
            Phase(
                "faults of the corpus",
                _corpus([one for one in ENTRIES if one.faulty], quick),
                together=True,
            ),
            Phase("two switches", _matrix(TWO_SWITCHES, quick)),
        ]
        chosen = [replace(one, jobs=tuple(_chosen(one.jobs, only))) for one in phases]
        return cls(tuple(one for one in chosen if one.jobs), _matches(TESTS, only))


def _matrix(settings: Iterable[str], quick: bool) -> tuple[Job, ...]:
    """The small models first: they say soonest what does not work at all."""
    names = [name for name in MODELS if not quick or name in _QUICK_MODELS]
    return tuple(
        Job("matrix", (name,), setting, SETTINGS[setting].roles)
        for setting in settings
        for name in names
    )


def _corpus(entries: Iterable[Entry], quick: bool) -> tuple[Job, ...]:
    """Slices of one architecture each, all first ones first, so that a limit cuts no architecture
    off whole."""
    by_architecture: dict[str, list[str]] = {}
    for entry in entries:
        if not quick or _matches(entry.name, _QUICK_ENTRIES):
            by_architecture.setdefault(entry.architecture.name, []).append(entry.name)
    slices = [
        (start, tuple(names[start : start + _SLICE]))
        for names in by_architecture.values()
        for start in range(0, len(names), _SLICE)
    ]
    by_round = sorted(slices, key=lambda one: one[0])
    return tuple(Job("corpus", names, CORPUS.name, _BY_FILE) for _, names in by_round)


def _models_of_corpus(quick: bool) -> tuple[Job, ...]:
    """One correct file of each architecture, whose model PyTorch runs on CUDA: it is the same for
    all of its files."""
    firsts: dict[str, str] = {}
    for entry in CORRECT_PAIRS:
        if not quick or _matches(entry.name, _QUICK_ENTRIES):
            firsts.setdefault(entry.architecture.name, entry.name)
    return tuple(Job("corpus", (name,), CORPUS.name, ("torch-cuda",)) for name in firsts.values())


def _chosen(jobs: Iterable[Job], only: Sequence[str]) -> Iterable[Job]:
    for job in jobs:
        yield from job.without([one for one in job.cells() if not _matches(one.name, only)])


def _matches(name: str, globs: Sequence[str]) -> bool:
    return not globs or any(fnmatch(name, glob) for glob in globs)

"""Measure models under settings, each job in a separate process, so that a crash affects only it.

Each measurement is written to a file, so that an interrupted run continues.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from benchmarks.corpus.bench import Bench, Pair
from benchmarks.corpus.correct import CORRECT_PAIRS
from benchmarks.corpus.entry import Entry
from benchmarks.corpus.exporters import DIRECT_17, ExportRefused
from benchmarks.corpus.registry import ENTRIES
from benchmarks.cuda.settings import (
    CORPUS,
    CORPUS_IN_TORCH,
    DEFAULT,
    SETTINGS,
    SWITCHED,
    Device,
    Setting,
)
from benchmarks.cuda.subjects import MODELS
from gate.api import collect_evidence
from gate.errors import GateError, first_line
from gate.records.evidence import Evidence
from gate.storage import files
from gate.storage.digest import Digest

BY_NAME = {entry.name: entry for entry in ENTRIES}

_ROOT = Path(__file__).parents[2]
_SLICE = 8
"""Entries of one architecture in a job, which share a model."""
_SLOWEST_S = 300.0
"""Time limit of a subject on a device, in seconds."""
_QUICK = (
    "*/grouped",
    "corpus*/correct/points/direct-17",
    "corpus*/correct/vit/direct-17",
    "corpus/fault/norm-epsilon/epsilon-of-pytorch-vit-norm/*",
    "corpus/fault/no-model/empty-*",
)

Status = Literal["measured", "refused", "not exported", "failed"]
"""`refused`: the gate raised an error for a file of the corpus."""


@dataclass(frozen=True)
class Job:
    """Subjects that one process measures under a setting."""

    setting: Setting
    subjects: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Return the names of the subjects, such as `tf32/resnet50` or `corpus/fault/sign/…`."""
        return [f"{self.setting.name}/{subject}" for subject in self.subjects]


@dataclass(frozen=True)
class Measurement:
    """The result of one subject under one setting."""

    setting: Setting
    subject: str
    status: Status
    reason: str = ""
    """Why there is no evidence."""
    evidence: Evidence | None = None


def plan(only: Sequence[str] = (), *, quick: bool = False) -> list[Job]:
    """Return all jobs, the most important first.

    only: glob patterns of names. quick: the smallest model and a few files of the corpus.
    """
    last_direct = sorted(CORRECT_PAIRS, key=lambda entry: entry.name.endswith("/direct-17"))
    file_by_architecture = {entry.architecture.name: entry.name for entry in last_direct}
    jobs = [
        *_matrix([DEFAULT]),
        # PyTorch runs the same model for all files of an architecture.
        *(Job(CORPUS_IN_TORCH, (name,)) for name in file_by_architecture.values()),
        *_corpus(CORRECT_PAIRS),
        *_matrix(SWITCHED),
        *_corpus(entry for entry in ENTRIES if entry.faulty),
    ]
    glob_groups = [only or ("*",), _QUICK if quick else ("*",)]
    selected = []
    for job in jobs:
        subjects = [
            subject
            for subject, name in zip(job.subjects, job.names, strict=True)
            if all(any(fnmatch(name, glob) for glob in globs) for globs in glob_groups)
        ]
        selected += [replace(job, subjects=tuple(subjects))] if subjects else []
    return selected


def _matrix(settings: Iterable[Setting]) -> list[Job]:
    return [Job(setting, tuple(MODELS)) for setting in settings]


def _corpus(entries: Iterable[Entry]) -> list[Job]:
    """Return slices of one architecture each, the first slices of all architectures first."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        names.setdefault(entry.architecture.name, []).append(entry.name)
    slices = [
        [
            tuple(names_of_one[start : start + _SLICE])
            for start in range(0, len(names_of_one), _SLICE)
        ]
        for names_of_one in names.values()
    ]
    rounds = itertools.zip_longest(*slices)
    return [Job(CORPUS, names_slice) for round_ in rounds for names_slice in round_ if names_slice]


class Measurements:
    """The folder with the measurements of this device and this version of the code."""

    def __init__(self, folder: Path, device: Device) -> None:
        code = [*_ROOT.glob("gate/**/*.py"), *_ROOT.glob("benchmarks/**/*.py")]
        digests = [Digest.from_bytes(path.read_bytes()).hex for path in sorted(code)]
        self.machine = device.describe()
        identity = json.dumps([self.machine, digests], sort_keys=True).encode()
        self.folder = folder / Digest.from_bytes(identity).hex[:12]
        self._device = device

    def read(self, name: str) -> Measurement | None:
        """Return a measurement, or None if it is missing or not readable."""
        setting, _, subject = name.partition("/")
        try:
            document = json.loads(gzip.decompress(_path(self.folder, name).read_bytes()))
        except (OSError, EOFError, ValueError):
            return None
        evidence = document.pop("evidence")
        return Measurement(
            SETTINGS[setting],
            subject,
            evidence=None if evidence is None else Evidence.from_json(json.dumps(evidence)),
            **document,
        )

    def measure(
        self,
        jobs: Iterable[Job],
        *,
        deadline: float,
        workers: int,
        report_done: Callable[[str], None],
    ) -> None:
        """Measure what is missing or failed until `deadline`, a time of `time.monotonic`."""
        for in_corpus, group in itertools.groupby(jobs, lambda job: job.setting.in_corpus):
            # Only one process measures the matrix at a time, because it measures latency.
            with ThreadPoolExecutor(workers if in_corpus else 1) as pool:
                for _ in pool.map(lambda job: self._run(job, deadline, report_done), group):
                    pass

    def _run(self, job: Job, deadline: float, report_done: Callable[[str], None]) -> None:
        earlier = {name: self.read(name) for name in job.names}
        remaining = [
            name for name, result in earlier.items() if result is None or result.status == "failed"
        ]
        for name in remaining:
            _path(self.folder, name).unlink(missing_ok=True)
        while remaining and (remaining_s := deadline - time.monotonic()) > 0:
            limit_s = _SLOWEST_S * (4 if self._device.dry else 1) * len(remaining)
            failure = self._run_process(job.setting, remaining, min(remaining_s, limit_s))
            measured = [name for name in remaining if _path(self.folder, name).exists()]
            remaining = remaining[len(measured) :]
            if failure and remaining and time.monotonic() < deadline:
                _write(self.folder, remaining[0], "failed", failure)
                measured.append(remaining.pop(0))
            for name in measured:
                report_done(name)

    def _run_process(self, setting: Setting, names: Sequence[str], limit_s: float) -> str:
        """Measure in a process. Return why it ended early, or an empty string."""
        log = self.folder / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **setting.environment(self._device)}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-m", "benchmarks.cuda.measuring", str(self.folder)]
        command += ["--dry-run"] if self._device.dry else []
        with log.open("ab") as stream:
            try:
                exit_status = subprocess.run(
                    [*command, *names], env=environment, stdout=stream, stderr=stream,
                    timeout=limit_s, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"it took longer than {limit_s:.0f} s"
        return (
            f"its process ended with status {exit_status} ({log} has more)" if exit_status else ""
        )


def main(folder: str, *names: str) -> None:
    """Measure these names and write a file for each.

    Stops after a failure, because a CUDA error affects all later computations of the process.
    """
    dry, names = "--dry-run" in names, tuple(name for name in names if name != "--dry-run")
    device = Device(dry=dry)
    device.prepare()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch))
        for name in names:
            setting, _, subject = name.partition("/")
            if not _measure(bench, SETTINGS[setting], subject, device, Path(folder)):
                return


def _measure(bench: Bench, setting: Setting, subject: str, device: Device, folder: Path) -> bool:
    """Measure one subject and write its file. Return False if it failed."""
    status: Status = "measured"
    reason, evidence = "", None
    try:
        pair = _pair(bench, setting, subject)
        evidence = collect_evidence(
            pair.path, policy=setting.policy(device), **pair.check_arguments()
        )
    except ExportRefused as error:
        status = "not exported" if setting.in_corpus else "failed"
        reason = str(error)
    except Exception as error:
        status = "refused" if setting.in_corpus and isinstance(error, GateError) else "failed"
        reason = f"{type(error).__name__}: {first_line(error)}"
    _write(folder, f"{setting.name}/{subject}", status, reason, evidence)
    return status != "failed"


def _pair(bench: Bench, setting: Setting, subject: str) -> Pair:
    folder = bench.folder / "subject"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if setting.in_corpus:
            return BY_NAME[subject].make(bench, folder / "model.onnx")
        return bench.pair(MODELS[subject], DIRECT_17, folder / "model.onnx")


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json.gz"


def _write(
    folder: Path, name: str, status: Status, reason: str, evidence: Evidence | None = None
) -> None:
    document: dict[str, Any] = {"status": status, "reason": reason}
    document["evidence"] = evidence.to_plain() if evidence else None
    files.write_bytes(_path(folder, name), gzip.compress(json.dumps(document).encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Compare what two commits measure on this machine, to the last bit.

    make frozen BASE=<commit>                       # evidence of 14 runs, a third of the corpus
    make frozen BASE=<commit> ALL=1                 # with the whole corpus
    python -m benchmarks.frozen <commit> --only logits --only corpus --entries 'fault/sign/*'

The base is checked out into a worktree below build/, which is removed at the end. Each side is run
by its command line only, so the two may have different modules. Exit code 0 only if every run of
both sides worked and nothing differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.frozen.compare import NOT_COMPARED, Difference, differences
from benchmarks.frozen.runs import RUNS, commands, write_inputs

ROOT = Path(__file__).parents[2]
CORPUS = "corpus"
_SHOWN = 3
"""Differences that the table shows of each kind; `--json` has all."""
_LIMIT_S = 4 * 3600
_SELECT = """
import json, sys
from benchmarks.corpus import __main__ as corpus, registry
if not sys.argv[1:]:
    print(json.dumps([entry.name for entry in registry.ENTRIES]))
    sys.exit()
names = set(json.load(sys.stdin))
registry.ENTRIES[:] = [entry for entry in registry.ENTRIES if entry.name in names]
sys.exit(corpus.main(sys.argv[1:]))
"""
"""Runs the corpus of a side on some entries: `--only` takes one pattern, not a list of names."""
_COMPARED = ("refused", "passed", "caught_by", "results", "cause", "located", "numbers")
"""Fields of an outcome of the corpus. Times and texts may differ."""
_RANDOM = ("fault/random/", "fault/training-mode/dropout-")
"""Files that draw random numbers: two runs of one commit have other numbers."""
_DECIDED = ("refused", "passed")
"""What is compared of those."""
_FOLDER = re.compile(r"[^'\s]*/(?=entry/)")
"""The temporary folder of a run, in messages about files."""
_FALLBACK = {"results": "told", "cause": "explained"}
"""The field to compare instead where the corpus of the base does not have the first one yet."""


class RunFailed(Exception):
    """A side could not measure."""


@dataclass(frozen=True)
class Side:
    """One of the two trees, and the folder in which its commands run."""

    name: str
    root: Path
    work: Path
    """A copy of the inputs. Both sides use the same path, one after the other."""
    tree: Path
    """A link to `root`, likewise: torch writes the paths of a model's source into ONNX files, and
    gate draws batch sizes of probes by the digest of a file."""
    metadata: Path

    @classmethod
    def prepare(cls, name: str, root: Path, folder: Path) -> Side:
        """Write package metadata whose entry points name the modules of this tree.

        The installed metadata belongs to one of the two trees. The other tree would find a second
        module for each of its runtimes and refuse both.
        """
        info = folder / f"metadata-{name}" / "parity_gate-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parity-gate\nVersion: 0\n")
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        lines = []
        for group, points in project["entry-points"].items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        return cls(name, root, folder / "work", folder / "tree", info.parent)

    def enter(self, inputs: Path) -> None:
        """Make `work` and `tree` those of this side. Raises RunFailed where `gate` is another's."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(inputs, self.work)
        self.tree.unlink(missing_ok=True)
        self.tree.symlink_to(self.root)
        path = self.run(["-c", "import gate; print(gate.__file__)"], folder=self.work).strip()
        if Path(path).parents[1].resolve() != self.root.resolve():
            raise RunFailed(f"{self.name} would run {path}")

    def run(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        stdin: str = "",
        codes: Sequence[int] = (0,),
    ) -> str:
        """Run Python with this side's `gate` and return its stdout. Raises RunFailed."""
        path = os.pathsep.join(map(str, (self.metadata, self.tree)))
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("GATE_", "MLFLOW_"))}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**variables, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
        if done.returncode not in codes:
            last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
            command = " ".join(word for word in arguments if word != _SELECT)
            raise RunFailed(f"exit code {done.returncode} of python {command}\n{last}")
        return done.stdout

    def evidence(self, kind: str) -> Any:
        """Return the evidence of one run. Raises RunFailed."""
        for command in commands(kind, f"report-{kind}"):
            self.run(["-m", "gate", *command], folder=self.work)
        return _read(self.work / f"report-{kind}" / "evidence.json")

    def names(self) -> list[str]:
        """Return the names of all entries of the corpus. Raises RunFailed."""
        return list(json.loads(self.run(["-P", "-c", _SELECT], folder=self.work)))

    def outcomes(self, names: Sequence[str], jobs: int) -> dict[str, dict[str, Any]]:
        """Return the outcome of each of these entries. Raises RunFailed."""
        file = self.metadata / "corpus.json"
        options = ["--json", str(file), "--jobs", str(jobs)]
        self.run(
            ["-P", "-c", _SELECT, *options], folder=self.work, stdin=json.dumps(names), codes=(0, 1)
        )
        outcomes = {row["name"]: row | (row.pop("ruling") or {}) for row in _read(file)["outcomes"]}
        judged = {name for name, row in outcomes.items() if row["refused"] or "passed" in row}
        if judged != set(names):
            raise RunFailed(f"{len(judged)} of {len(names)} entries of the corpus were judged")
        return outcomes


def main(arguments: list[str] | None = None) -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.frozen", description=__doc__)
    parser.add_argument("base", metavar="COMMIT", help="the commit to compare with")
    kinds = [*RUNS, CORPUS]
    parser.add_argument("--only", action="append", choices=kinds, help="this kind; repeatable")
    parser.add_argument("--all", action="store_true", help="the whole corpus, not a third of it")
    parser.add_argument("--entries", metavar="GLOB", help="of the corpus, entries with such a name")
    parser.add_argument("--jobs", type=int, default=2, help="processes that judge the corpus (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all differences, by kind")
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worktree is removed
    (ROOT / "build").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="frozen-") as name,
        _checked_out(asked.base, Path(name) / "base") as base,
    ):
        sides = [Side.prepare("base", base, Path(name)), Side.prepare("current", ROOT, Path(name))]
        results = _compared(sides, asked, Path(name) / "inputs")
    _print(results)
    if asked.json:
        plain = {kind: [row._asdict() for row in rows] for kind, rows in results.items()}
        asked.json.write_text(json.dumps(plain, indent=1) + "\n")
    return 1 if not results or any(results.values()) else 0


@contextmanager
def _checked_out(commit: str, folder: Path) -> Iterator[Path]:
    git = ["git", "-C", str(ROOT), "worktree"]
    if subprocess.run(
        [*git, "add", "--quiet", "--detach", str(folder), commit], check=False
    ).returncode:
        raise SystemExit(2)  # git has printed why
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def _compared(
    sides: Sequence[Side], asked: argparse.Namespace, inputs: Path
) -> dict[str, list[Difference]]:
    kinds = asked.only or [*RUNS, CORPUS]
    inputs.mkdir()
    write_inputs(inputs)
    values: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for side in sides:
        side.enter(inputs)
        for kind in kinds:
            began = time.monotonic()
            try:
                if kind == CORPUS:
                    names = select(side.names(), whole=asked.all, pattern=asked.entries)
                    values[kind].append(side.outcomes(names, asked.jobs))
                    print(f"{side.name}: {len(names)} entries of the corpus")
                else:
                    values[kind].append(side.evidence(kind))
            except RunFailed as failure:
                values[kind].append(failure)
                print(f"{side.name}: {kind}: {failure}", file=sys.stderr)
            print(f"{side.name}: {kind}: {time.monotonic() - began:.0f} s", flush=True)
    return {kind: list(compare_kind(kind, *pair)) for kind, pair in values.items()}


def select(names: Sequence[str], *, whole: bool = False, pattern: str | None = None) -> list[str]:
    """Return a third of the names, chosen by digest, so that a new entry does not move the others.

    `whole`: not a third of them but all. `pattern`: those that match it.
    """
    return [
        name
        for name in names
        if (whole or int(hashlib.sha256(name.encode()).hexdigest(), 16) % 3 == 0)
        and fnmatch(name, pattern or "*")
    ]


def compare_kind(kind: str, base: Any, current: Any) -> Iterator[Difference]:
    """Yield the differences of one kind. Two sides without a value are a difference, too."""
    if not (isinstance(base, dict) and isinstance(current, dict) and base and current):
        yield Difference("", _state(base), _state(current))
    elif kind == CORPUS:
        for name in base | current:
            before, now = base.get(name), current.get(name)
            if before is None or now is None:
                yield Difference(name, _state(before), _state(now))
            else:
                fields = [
                    field if field in before else _FALLBACK.get(field, field)
                    for field in _COMPARED
                    if field in _DECIDED or not name.startswith(_RANDOM)
                ]
                yield from differences(_only(fields, before), _only(fields, now), path=name)
    else:
        yield from differences(base, current, not_compared=NOT_COMPARED)


def _state(value: Any) -> str:
    if isinstance(value, RunFailed):
        return str(value).splitlines()[0]  # the rest is on stderr
    return "measured" if value else "missing"


def _only(fields: Sequence[str], outcome: dict[str, Any]) -> dict[str, Any]:
    return {
        field: _FOLDER.sub("", value) if isinstance(value := outcome[field], str) else value
        for field in fields
        if field in outcome
    }


def _read(path: Path) -> Any:
    if not path.is_file():
        raise RunFailed(f"{path.name} was not written")
    return json.loads(path.read_text())


def _print(results: dict[str, list[Difference]]) -> None:
    shown = Table(box=None, pad_edge=False)
    for heading in ("kind", "result", "path", "base", "current"):
        shown.add_column(heading, overflow="fold")
    for kind, rows in results.items():
        if not rows:
            shown.add_row(kind, "equal")
        for row in rows[:_SHOWN]:
            shown.add_row(kind, f"{len(rows)} differ", *map(Text, row))
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


if __name__ == "__main__":
    sys.exit(main())

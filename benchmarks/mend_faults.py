"""Count the faults that `gate mend` repairs and those that `gate reproduce` reduces to a script.

    .venv/bin/python -m benchmarks.mend_faults                    # 24 of the corpus, 12 others
    .venv/bin/python -m benchmarks.mend_faults 'fault/resize-*'   # by name
    .venv/bin/python -m benchmarks.mend_faults --python fresh/bin/python

Each file that mend finds is checked again on new samples. `--python` runs each script of gate
reproduce with that Python, for example one with only numpy and onnxruntime. Exit code 0 only if no
mended file is rejected on new samples.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpus.bench import Bench, Pair
from benchmarks.corpus.entry import Entry
from benchmarks.corpus.registry import FAULTS
from benchmarks.mend_models import MORE_FAULTS
from gate.api import build_job, check
from gate.data.samples import SampleSet
from gate.errors import GateError, first_line
from gate.localize.reduce import NotReproduced
from gate.localize.reproducer import DIFFERS, Reproducer
from gate.measure.job import EvaluationData, Reference
from gate.mend.plan import MendPlan, names_of
from gate.mend.recipe import Builder, example_of, halves
from gate.mend.search import Search, with_disabled
from gate.policy.policy import Policy
from gate.records.export import ExportSettings
from gate.storage.files import temporary_folder

_CORPUS_FAULTS = (
    "fault/index-sign/negativeindices/direct-17",
    "fault/index-sign/separatedindices/traced-17",
    "fault/integer-division/floorofnegatives/traced-13",
    "fault/integer-division/flooroffloats/direct-20",
    "fault/in-place/throughaview/direct-17",
    "fault/in-place-shape/inplaceshape/traced-17",
    "fault/overflow/softmax-without-maximum-sharp/direct-13",
    "fault/nan-for-some-inputs/variance-by-moments-standardised/traced-13",
    "fault/duplicate-indices/duplicateputs/direct-17",
    "fault/duplicate-indices/duplicateadds/direct-20",
    "fault/duplicate-indices/meanbyscatter/dynamo-18",
    "fault/duplicate-indices/points/traced-13",
    "fault/inf-on-one-side/logsigmoid/traced-17",
    "fault/baked-branch/branching/traced-13",
    "fault/baked-batch/countedbatch/traced-17",
    "fault/ignored-argument/owndivisor/direct-17",
    "fault/ignored-argument/steepsoftplus/direct-17",
    "fault/training-mode/norm-in-training-two-inputs-norm/direct-17-preserved",
    "fault/float16-island/tensor-through-float16-recurrent/traced-13",
    "fault/fixed-batch/mobilenet/direct-17-fixed",
    "fault/resize-coordinates/corners-aligned-pyramid-linear/dynamo-18",
    "fault/norm-epsilon/epsilon-of-tensorflow-detector/dynamo-18",
    "fault/output-order/reversed-outputs-detector/direct-17",
    "fault/gelu-approximation/gelu-by-tanh-vit-block1.gelu/direct-17",
)
"""Faults of several classes. An exporter made most of them from a correct model."""

_CANDIDATES = 60
"""Candidates covered by the default budget of gate mend."""

_TIME_LIMIT_S = 900.0
_FRESH_SAMPLES = 24


@dataclass(frozen=True)
class Case:
    """A faulty file with the reference and the data to check it."""

    pair: Pair
    reference: Reference
    data: EvaluationData

    @classmethod
    def from_entry(cls, entry: Entry, bench: Bench, path: Path) -> Case:
        """Write the faulty file and return the case."""
        pair = entry.make(bench, path)
        arguments = pair.check_arguments()
        return cls(pair, arguments["reference"], arguments["data"])


def mend(case: Case, entry: Entry, folder: Path) -> tuple[str, str]:
    """Search for a mended file and check it again on new samples.

    Returns the candidate's title, or how the search ended, and the verdict on new samples.
    """
    settings, policy = ExportSettings(opset="auto"), Policy.default()
    try:
        names = names_of(case.pair.path, settings)
    except GateError:
        names = None
    samples = halves(case.data)
    budget = _CANDIDATES * len(samples[0].samples) + len(samples[1].samples)
    search = Search(case.reference, policy, budget, deadline=time.monotonic() + _TIME_LIMIT_S)
    file = case.pair.path if names is not None else None
    builder = Builder(case.reference, example_of(case.data.samples, settings), file)
    outcome = MendPlan(search, builder, settings, names).run(samples, folder)
    winner = outcome.winner
    if winner is None:
        closest = search.best.title if search.best else ""
        return f"nothing ({outcome.ended_by}, {len(search.trials)} trials; {closest})", ""
    fresh_samples = SampleSet.from_arrays(entry.architecture.draw(_FRESH_SAMPLES, 12))
    recheck = check(
        winner.path,
        case.reference,
        EvaluationData(fresh_samples, batch_size=case.pair.batch_size),
        with_disabled(policy, winner.candidate.disabled_optimizers),
    )
    result = f"{winner.candidate.stage}: {winner.candidate.title} ({len(search.trials)} trials)"
    return result, recheck.decision.verdict.value


def reproduce(case: Case, folder: Path, python: str | None) -> tuple[int | None, str]:
    """Reduce the graph and run the generated script.

    Returns the node count and the kind of the reduced graph if the script shows the difference,
    else None and the reason.
    """
    policy = Policy.default()
    result = check(case.pair.path, case.reference, case.data, policy)
    job = build_job(case.pair.path, reference=case.reference, data=case.data, policy=policy)
    try:
        reproducer = Reproducer.from_rejection(job, result.evidence, result.decision)
        if reproducer is None:
            return None, f"no difference of outputs ({result.decision.verdict.value})"
        reproducer.write(folder / "bug.zip", venv=False)
    except NotReproduced as error:
        return None, first_line(error)
    with zipfile.ZipFile(folder / "bug.zip") as archive:
        archive.extractall(folder)
    command = [python or sys.executable, "-I", "reproduce.py"]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if process.returncode != 1 or process.stdout.splitlines()[-1:] != [DIFFERS]:
        return None, f"{python} does not show the difference"
    operators = [node.op_type for node in reproducer.failure.model.graph.node]
    layer = ", layer.py" if (folder / "layer.py").is_file() else ""
    return reproducer.failure.nodes, f"{reproducer.failure.kind}: {', '.join(operators[:8])}{layer}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Mend and reproduce each fault, print two lines per fault, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", help="names of faults; default: all 36")
    parser.add_argument("--python", help="an interpreter that runs the scripts")
    options = parser.parse_args(arguments)
    entries = _select_entries(options.patterns)
    verdicts: list[str] = []
    nodes: list[int] = []
    with temporary_folder() as folder:
        bench = Bench(Path(folder))
        for index, entry in enumerate(entries):
            folders = [Path(folder, f"{index}-{name}") for name in ("faulty", "mended", "bug")]
            for case_folder in folders:
                case_folder.mkdir()
            case = Case.from_entry(entry, bench, folders[0] / "model.onnx")
            begun = time.monotonic()
            result, verdict = mend(case, entry, folders[1])
            seconds = time.monotonic() - begun
            print(f"{entry.name}: {result} {verdict} {seconds:.0f} s", flush=True)
            count, description = reproduce(case, folders[2], options.python)
            print(f"    {count} nodes, {description}", flush=True)
            verdicts += [verdict] if verdict else []
            nodes += [] if count is None else [count]
    rejected = len(verdicts) - verdicts.count("PASS")
    print(f"{len(verdicts)} of {len(entries)} mended, {rejected} rejected on fresh samples")
    median = statistics.median(nodes) if nodes else "no"
    print(f"{len(nodes)} of {len(entries)} reproduced, {median} nodes in the median")
    return 1 if rejected else 0


def _select_entries(patterns: Sequence[str]) -> list[Entry]:
    by_name: Mapping[str, Entry] = {entry.name: entry for entry in (*FAULTS, *MORE_FAULTS)}
    names = list(by_name) if patterns else [*_CORPUS_FAULTS, *(fault.name for fault in MORE_FAULTS)]
    selected_patterns = patterns or ["*"]
    return [
        by_name[n]
        for n in names
        if any(fnmatch.fnmatch(n, pattern) for pattern in selected_patterns)
    ]


if __name__ == "__main__":
    sys.exit(main())

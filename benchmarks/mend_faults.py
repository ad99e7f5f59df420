"""For how many faults of the corpus does gate mend find a file that passes?

    .venv/bin/python -m benchmarks.mend_faults                    # the faults of `_FAULTS`
    .venv/bin/python -m benchmarks.mend_faults 'fault/resize-*'   # others, by name

Each file that mend finds is checked again on samples that it did not have. Exit code 0 only if none
of them is rejected there.
"""

from __future__ import annotations

import fnmatch
import sys
import time
from pathlib import Path

from benchmarks.corpus.bench import Bench
from benchmarks.corpus.entry import Entry
from benchmarks.corpus.registry import FAULTS
from gate.api import check
from gate.data.samples import SampleSet
from gate.errors import GateError
from gate.measure.job import EvaluationData, Reference
from gate.mend.plan import MendPlan, names_of
from gate.mend.recipe import Builder, example_of, halves
from gate.mend.search import Search, with_disabled
from gate.policy.policy import Policy
from gate.records.evidence import Source
from gate.records.export import ExportSettings
from gate.storage.files import temporary_folder

_FAULTS = (
    "fault/index-sign/negativeindices/*",
    "fault/integer-division/floorofnegatives/traced-13",
    "fault/in-place/throughaview/*",
    "fault/overflow/softmax-without-maximum-sharp/*",
    "fault/duplicate-indices/duplicateputs/*",
    "fault/inf-on-one-side/logsigmoid/traced-17",
    "fault/baked-branch/branching/traced-13",
    "fault/ignored-argument/owndivisor/direct-17",
    "fault/training-mode/norm-in-training-two-inputs-norm/*",
    "fault/ignored-argument/steepsoftplus/*",
    "fault/duplicate-indices/points/traced-13",
    "fault/float16-island/tensor-through-float16-recurrent/*",
    "fault/fixed-batch/mobilenet/*",
    "fault/resize-coordinates/corners-aligned-pyramid-linear/*",
    "fault/norm-epsilon/epsilon-of-tensorflow-detector/*",
    "fault/output-order/reversed-outputs-detector/direct-17",
    "fault/no-model/garbage-tokens/*",
)
_SECONDS = 900.0
_FRESH = 24


def mend(entry: Entry, bench: Bench, folder: Path) -> tuple[str, str]:
    """Return the title of what was found, or how the search ended; and the verdict on fresh
    samples."""
    (folder / "faulty").mkdir()
    pair = entry.make(bench, folder / "faulty" / "model.onnx")
    reference = Reference(pair.model, Source(factory="benchmarks.corpus"), export=pair.record)
    data = EvaluationData(SampleSet.from_arrays(pair.samples), batch_size=pair.batch_size)
    settings = ExportSettings(opset="auto")
    try:
        names = names_of(pair.path, settings)
    except GateError:
        names = None
    policy = Policy.default()
    search = Search(reference, policy, 10**6, deadline=time.monotonic() + _SECONDS)
    file = pair.path if names is not None else None
    builder = Builder(reference, example_of(data.samples, settings), file)
    (folder / "mended").mkdir()
    outcome = MendPlan(search, builder, settings, names).run(halves(data), folder / "mended")
    winner = outcome.winner
    if winner is None:
        closest = search.best.title if search.best else ""
        return f"nothing ({outcome.ended_by}, {len(search.trials)} trials; {closest})", ""
    fresh = EvaluationData(
        SampleSet.from_arrays(entry.architecture.draw(_FRESH, 12)), batch_size=pair.batch_size
    )
    again = check(
        winner.path,
        reference,
        fresh,
        with_disabled(policy, winner.candidate.disabled_optimizers),
    )
    found = f"{winner.candidate.stage}: {winner.candidate.title} ({len(search.trials)} trials)"
    return found, again.decision.verdict.value


def main(patterns: list[str]) -> int:
    """Mend, print a line for each fault, and return the exit code."""
    wanted = patterns or list(_FAULTS)
    entries = [e for p in wanted for e in FAULTS if fnmatch.fnmatch(e.name, p)]
    mended, rejected = 0, 0
    with temporary_folder() as folder:
        bench = Bench(Path(folder))
        for place, entry in enumerate(entries):
            room = Path(folder, str(place))
            room.mkdir()
            begun = time.monotonic()
            found, fresh = mend(entry, bench, room)
            mended += bool(fresh)
            rejected += fresh not in ("", "PASS")
            print(f"{entry.name}: {found} {fresh} {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{mended} of {len(entries)} mended, {rejected} of these rejected on fresh samples")
    return 1 if rejected else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

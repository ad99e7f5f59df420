"""The process that measures: jobs come on its standard input, the name of each subject that is done
goes out. What a library prints goes to the log.

It ends itself after a cell that failed, because an error of CUDA spoils all that the process
computes afterwards; the next subject gets a new one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cuda.cell import Job
from benchmarks.cuda.device import Device
from benchmarks.cuda.store import Store


def main() -> int:
    """Measure until there are no more jobs."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    start = json.loads(sys.stdin.readline())
    device = Device(dry=start["dry"])
    device.prepare()
    store = Store(Path(start["folder"]), start["identity"], mark=device.mark)
    from benchmarks.cuda.measuring import Measurer  # which reads the whole corpus

    with tempfile.TemporaryDirectory() as folder:
        measurer = Measurer(device, store, Path(folder))
        for line in sys.stdin:
            job = Job.from_plain(json.loads(line))
            for subject in measurer.run(job):
                _say(answers, {"subject": subject})
                if any(_failed(store, job, subject)):
                    return 0
            _say(answers, {"job": "done"})
    return 0


def _failed(store: Store, job: Job, subject: str) -> list[bool]:
    kept = [store.get(cell) for cell in job.cells(subject)]
    return [one is None or one.status == "failed" for one in kept]


def _say(answers: Any, message: dict[str, str]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Who measures the samples of a stage: this process, or a crew, as params.yaml says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gate.distributed.worker_pool import CheckedFile, Cluster, RayPool, worth_a_trial
from gate.measure.job import EvaluationData, Reference
from gate.onnx_file.release_file import is_release_file
from gate.policy.policy import Policy
from pipelines.params import ParityParams

_REFERENCE = "pipelines.model:reference"
"""How workers build the model that the stages share."""


@contextlib.contextmanager
def shared_out(onnx: Path, workload: EvaluationData, policy: Policy) -> Iterator[EvaluationData]:
    """The workload with its crew, if it has one: `parity.engine` and `parity.jobs`.

    Raises PolicyError where several are asked for and can't be, and what opening the files raises.
    """
    params = ParityParams.load()
    few = is_release_file(onnx) or not worth_a_trial(workload.samples, workload.batch_size)
    if params.engine == "processes" and (params.jobs == 1 or (params.jobs is None and few)):
        yield workload  # nobody builds the model again
        return
    with contextlib.ExitStack() as held:
        if params.engine == "ray":
            pool = held.enter_context(RayPool.open(Cluster(workers=params.jobs)))
            crew = _checked(onnx, workload, policy).by_cluster(pool)
        else:
            crew = _checked(onnx, workload, policy).by_processes(params.jobs)
        yield held.enter_context(crew)


def _checked(onnx: Path, workload: EvaluationData, policy: Policy) -> CheckedFile:
    return CheckedFile(onnx, Reference.from_factory(_REFERENCE), workload, policy)

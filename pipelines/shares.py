"""Decide whether this process or a pool of workers measures a stage's samples (params.yaml)."""

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
"""Factory with which workers build the trained model."""


@contextlib.contextmanager
def with_workers(onnx: Path, workload: EvaluationData, policy: Policy) -> Iterator[EvaluationData]:
    """Yield the workload, with workers if `parity.engine` and `parity.jobs` request them.

    Raises PolicyError if workers are requested but can't be used, and the exceptions of opening
    files.
    """
    params = ParityParams.load()
    few = is_release_file(onnx) or not worth_a_trial(workload.samples, workload.batch_size)
    if params.engine == "processes" and (params.jobs == 1 or (params.jobs is None and few)):
        yield workload  # a worker would have to build the model again
        return
    with contextlib.ExitStack() as stack:
        if params.engine == "ray":
            pool = stack.enter_context(RayPool.open(Cluster(workers=params.jobs)))
            context = _check_file(onnx, workload, policy).by_cluster(pool)
        else:
            context = _check_file(onnx, workload, policy).by_processes(params.jobs)
        yield stack.enter_context(context)


def _check_file(onnx: Path, workload: EvaluationData, policy: Policy) -> CheckedFile:
    return CheckedFile(onnx, Reference.from_factory(_REFERENCE), workload, policy)

"""NVIDIA Polygraphy's comparator with its defaults.

An element fails if it differs by more than 1e-5 and by more than 1e-5 of the reference.
Polygraphy's runner for PyTorch needs CUDA, so the reference runs in a custom runner as in its
examples. The reference comes second, because tolerances are relative to the second runner.
"""

from __future__ import annotations

import time
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER

from benchmarks.peers.case import Case, open_session


def judge(case: Case, *, optimized: bool = True) -> bool:
    """Compare all samples. `optimized` is the default of Polygraphy's ONNX Runtime runner."""
    runners = [
        OnnxrtRunner(lambda: open_session(str(case.file), optimized=optimized)),
        TorchRunner(case),
    ]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        results = Comparator.run(runners, data_loader=list(case.batches()))
        return bool(Comparator.compare_accuracy(results))


class TorchRunner(BaseRunner):
    """A Polygraphy runner for the reference model."""

    def __init__(self, case: Case) -> None:
        super().__init__(name="torch")
        self._case = case

    def get_input_metadata_impl(self) -> TensorMetadata:
        metadata = TensorMetadata()
        for name, array in self._case.samples.items():
            metadata.add(name, dtype=array.dtype, shape=(None, *array.shape[1:]))
        return metadata

    def infer_impl(
        self, feed_dict: dict[str, NDArray[np.generic]]
    ) -> OrderedDict[str, NDArray[np.generic]]:
        start = time.time()
        ordered = {name: feed_dict[name] for name in self._case.samples}
        outputs = self._case.expected_outputs(ordered)
        self.inference_time = time.time() - start
        return OrderedDict(zip(self._case.outputs, outputs, strict=True))

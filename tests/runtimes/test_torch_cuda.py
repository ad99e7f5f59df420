"""Errors that show that a model cannot run on CUDA."""

from __future__ import annotations

import numpy as np
import pytest

from gate.errors import RuntimeAbsent
from gate.policy.runtime_options import NoOptions
from gate.runtimes import ort
from gate.runtimes.runtime import RunnableFile
from gate.runtimes.torch_cuda import TorchCudaRuntime

BATCH = {"input": np.zeros((1, 3), np.float32)}


class FailingSession:
    """A session that fails with an error message of PyTorch."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def run(self, batch):
        assert batch is BATCH
        if self._error is not None:
            raise self._error
        return []


@pytest.fixture
def opened(monkeypatch):
    """Return a function that opens a session of a model that fails with this error."""
    monkeypatch.setattr(ort, "cuda_unusable_reason", lambda: None)

    def open_with(error):
        session = FailingSession(error)
        file = RunnableFile(None, lambda device: session)
        result = TorchCudaRuntime().open(file, options=NoOptions(), conditions=None, example=BATCH)
        return result is session

    return open_with


CPU_ONLY_ERRORS = [
    RuntimeError("Expected all tensors to be on the same device, but got index is on cpu, different from other tensors on cuda:0 (when checking argument in method wrapper_CUDA_index_add)"),
    RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
    RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)"),
    RuntimeError("Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same"),
    RuntimeError("Input and hidden tensors are not at the same device, found input tensor at cuda:0 and hidden tensor at cpu"),
    TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."),
]  # fmt: skip


@pytest.mark.parametrize("error", CPU_ONLY_ERRORS)
def test_cpu_only_model_is_absent_on_cuda(opened, error):
    with pytest.raises(RuntimeAbsent, match="the model runs on the CPU alone") as absent:
        opened(error)
    assert str(error).splitlines()[0] in str(absent.value)


@pytest.mark.parametrize(
    "error",
    [
        None,
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        ValueError("Expected more than 1 value per channel"),
        RuntimeError(
            "Input type (torch.cuda.HalfTensor) and bias type (torch.cuda.FloatTensor) should be "
            "the same"
        ),
    ],
)
def test_other_cuda_errors_do_not_make_the_runtime_absent(opened, error):
    assert opened(error)

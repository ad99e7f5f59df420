"""Validation by packages that need a separate environment, because they pin other versions."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from typing import TYPE_CHECKING, Any, ClassVar

import onnx
import torch
from torch import nn

from benchmarks.peers.case import CannotJudge, Case, open_session, to_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator


def onnx_diagnostic(case: Case) -> bool:
    """Run `ExtTestCase.assert_onnx_disc` on all samples with its defaults.

    An output fails if it differs by more than 1e-5 or by more than 1e-3 of the reference.
    """
    from onnx_diagnostic.ext_test_case import ExtTestCase

    # It writes a file that does not load into the current folder.
    with torch.no_grad(), contextlib.chdir(case.file.parent):
        ExtTestCase().assert_onnx_disc(
            "", onnx.load(case.file), case.model, [to_tensors(batch) for batch in case.batches()]
        )
    return True  # Otherwise it raised AssertionError.


def pytest_torch(case: Case) -> bool:
    """Run `assert_onnx_parity` on the first batch with its defaults, 1e-4 plus 1e-3 relative.

    It exports its own file and does not read the file of the case.
    """
    from pytest_torch import assert_onnx_parity

    assert_onnx_parity(case.model, to_tensors(next(case.batches())))
    return True  # Otherwise it raised AssertionError.


def optimum(case: Case) -> bool:
    """Run `validate_model_outputs` of optimum-onnx on the first batch.

    Uses the tolerance of its configurations, 1e-5 plus 1e-5 of the reference. In an export, the
    mismatch that it raises becomes a warning.
    """
    from optimum.exporters.onnx.base import OnnxConfig
    from optimum.exporters.onnx.convert import validate_model_outputs

    axes = {
        output.name: dict(enumerate(output.shape))
        for output in open_session(str(case.file)).get_outputs()
    }

    class Config(OnnxConfig):
        """A configuration for the case's model, which is not one of transformers."""

        inputs: ClassVar[Any] = {}
        outputs: ClassVar[Any] = {name: axes.get(name, {}) for name in case.outputs}

        def __init__(self) -> None:
            pass

        def generate_dummy_inputs(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
            batch = next(case.batches())
            return dict(zip(batch, to_tensors(batch), strict=True))

        @contextlib.contextmanager
        def patch_model_for_export(self, *_: Any, **__: Any) -> Iterator[None]:
            yield

    class NamedOutputs(nn.Module):
        """A wrapper that returns outputs by name, as models of transformers do."""

        def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = case.model(*inputs.values())
            leaves = torch.utils._pytree.tree_leaves(outputs)
            return dict(zip(case.outputs, leaves, strict=True))

    logging.getLogger("optimum").setLevel(logging.CRITICAL)
    validate_model_outputs(
        Config(), NamedOutputs().eval(), case.file, list(case.outputs), use_subprocess=False
    )
    return True  # Otherwise it raised an exception.


def olive(case: Case) -> bool:
    """Run Olive's pass `OnnxDiscrepancyCheck` with its defaults, which have no bound.

    It generates inputs, reads the model from a folder of transformers, and identifies axes by name.
    """
    model: Any = getattr(case.model, "model", None)
    if not type(model).__name__.endswith("ForCausalLM"):
        raise CannotJudge("it takes causal language models of transformers")
    from olive.model import ONNXModelHandler
    from olive.passes.olive_pass import create_pass_from_dict
    from olive.passes.onnx.discrepancy_check import OnnxDiscrepancyCheck

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        proto = onnx.load(case.file)
        for value in (*proto.graph.input, *proto.graph.output):
            for axis, name in enumerate(("batch_size", "sequence_length")):
                dimension = value.type.tensor_type.shape.dim[axis]
                if dimension.HasField("dim_param"):
                    dimension.dim_param = name
        file = f"{folder}/model.onnx"
        onnx.save(proto, file)
        settings = {"reference_model_path": folder}
        check = create_pass_from_dict(OnnxDiscrepancyCheck, settings, disable_search=True)
        check.run(ONNXModelHandler(file), f"{folder}/checked")
    return True  # Otherwise it raised an exception.

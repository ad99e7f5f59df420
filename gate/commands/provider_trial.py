"""Run a small residual network on a provider: placement of its nodes, and its precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gate.records.runtime import CPU_PROVIDER, CUDA_PROVIDER
from gate.storage.files import temporary_folder

EXACT = 1e-5
"""Largest error of float32, relative to the largest output. TF32 exceeds it."""

_WIDTH = 32


@dataclass(frozen=True)
class ProviderTrial:
    """Placement and errors of one run of the network."""

    nodes_per_provider: dict[str, int]
    cpu_nodes: tuple[str, ...]
    """`op_type:node_name` of the nodes on the CPU."""
    exact_error: float
    """max|c - r| / max|r| against ONNX Runtime on the CPU, with TF32 off."""
    default_error: float
    """The same with the provider's default options."""

    @property
    def reduces(self) -> bool:
        """Return whether the provider computes below float32 precision by default."""
        return not self.default_error <= EXACT


def try_provider(provider: str = CUDA_PROVIDER) -> ProviderTrial:
    """Run the network on `provider` twice, with TF32 off and by default, and on the CPU.

    Raises RuntimeUnusable if the provider does not load, and the exceptions of ONNX Runtime.
    """
    import numpy as np

    images = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype(np.float32)
    model = residual_network()
    reference, _ = _run(model, CPU_PROVIDER, {}, images)
    exact = {"use_tf32": "0"} if provider == CUDA_PROVIDER else {}
    plain, placement = _run(model, provider, exact, images)
    default, _ = _run(model, provider, {}, images)
    size = float(np.abs(reference).max())
    errors = [float(np.abs(each - reference).max()) / size for each in (plain, default)]
    return ProviderTrial(placement.nodes_per_provider, placement.cpu_compute_nodes, *errors)


def _run(model: bytes, provider: str, options: Mapping[str, str], images: Any) -> tuple[Any, Any]:
    from gate.onnx_file.sessions import open_session, read_placement, session_options
    from gate.policy.runtime_options import OrtSetup

    setup = OrtSetup((provider,), "ORT_ENABLE_ALL", {provider: options})
    with temporary_folder() as folder:
        settings = session_options(setup, threads=1, deterministic=False)
        settings.enable_profiling = True
        settings.profile_file_prefix = str(Path(folder) / "placement")
        session = open_session(model, settings, setup)
        (logits,) = session.run(None, {"images": images})
        return logits, read_placement(Path(session.end_profiling()))


def residual_network() -> bytes:
    """Return an ONNX network of convolutions, a residual connection, pooling and a linear layer."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    generator = np.random.default_rng(0)
    shapes = {
        "first": (_WIDTH, 3, 3, 3),
        "second": (_WIDTH, _WIDTH, 3, 3),
        "third": (_WIDTH, _WIDTH, 3, 3),
        "head": (_WIDTH, 10),
    }
    weights = [
        numpy_helper.from_array(
            (generator.normal(size=shape) / np.sqrt(np.prod(shape) / shape[0])).astype(np.float32),
            name,
        )
        for name, shape in shapes.items()
    ]
    pads = [1, 1, 1, 1]
    nodes = [
        helper.make_node("Conv", ["images", "first"], ["a"], "first/Conv", pads=pads),
        helper.make_node("Relu", ["a"], ["b"], "first/Relu"),
        helper.make_node("Conv", ["b", "second"], ["c"], "second/Conv", pads=pads),
        helper.make_node("Relu", ["c"], ["d"], "second/Relu"),
        helper.make_node("Conv", ["d", "third"], ["e"], "third/Conv", pads=pads),
        helper.make_node("Add", ["b", "e"], ["f"], "third/Add"),
        helper.make_node("GlobalAveragePool", ["f"], ["g"], "pool"),
        helper.make_node("Flatten", ["g"], ["h"], "flatten"),
        helper.make_node("Gemm", ["h", "head"], ["logits"], "head/Gemm"),
    ]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, 32, 32])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 10])
    graph = helper.make_graph(nodes, "residual", [images], [logits], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(model.SerializeToString())

"""The spec as an ONNX graph in ONNX Runtime on the CPU; and without half pixel and antialias."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from gate.onnxfile.session import open_on_cpu
from gate.preprocess.by.onnx_graph import PICTURES, TENSORS, Coordinates, build
from gate.preprocess.geometry import geometry
from gate.preprocess.implementation import Implementation, Preprocess
from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import Pixels, Tensor


@contextmanager
def _opened(spec: PreprocessSpec, *, coordinates: Coordinates) -> Iterator[Preprocess]:
    session = open_on_cpu(build(spec, coordinates=coordinates).SerializeToString())

    def preprocess(pixels: Pixels) -> Tensor:
        geometry(spec, *pixels.shape[:2])  # refuses what the graph would compute nonsense of
        tensor: Tensor = session.run([TENSORS], {PICTURES: pixels[None]})[0][0]
        return tensor

    yield preprocess


def _incapable(spec: PreprocessSpec, *, coordinates: Coordinates) -> str | None:
    if coordinates == "asymmetric" and spec.resize is None:
        return "without a resize there are no coordinates"
    return None


def _version() -> str:
    from importlib.metadata import version

    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}, onnx {version('onnx')}"


def _made(coordinates: Coordinates) -> Implementation:
    return Implementation(
        partial(_incapable, coordinates=coordinates),
        partial(_opened, coordinates=coordinates),
        _version,
    )


IMPLEMENTATION = _made("half_pixel")
ASYMMETRIC = _made("asymmetric")

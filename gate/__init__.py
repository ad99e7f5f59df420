"""parity-gate: the gate between an ONNX export and the model registry."""

__version__ = "0.1.0"

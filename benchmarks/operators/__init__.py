"""Compare ONNX Runtime's operators with float64 in units of the gate's error models."""

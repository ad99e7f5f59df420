"""ONNX Runtime's operators against float64, in units of our error models."""

"""The ONNX side, without torch: reading files, and opening them in ONNX Runtime."""

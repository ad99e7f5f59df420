"""The ONNX graph, read without running it: what a reviewer should know before any number."""

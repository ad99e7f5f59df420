"""Releases of several ONNX files: the parts and the chain that runs them."""

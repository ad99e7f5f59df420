"""Export a model to a verified ONNX file."""

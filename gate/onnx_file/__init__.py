"""The ONNX file, without torch: parsing, digests, ONNX Runtime sessions."""

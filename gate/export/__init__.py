"""From nn.Module to an ONNX file: building the model, exporting it, reading the file."""

"""The PyTorch model: build it, load weights, call it, record its source code."""

"""PyTorch's exporters, one module a strategy."""

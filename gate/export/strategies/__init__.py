"""PyTorch's exporters, one module each, by the strategies that lead to them."""

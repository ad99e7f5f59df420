"""The PyTorch side: building a model, calling it, and the code that defines it."""

"""The PyTorch reference in float32, in float64 and under random rounding."""

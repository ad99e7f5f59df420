"""Golden vectors: stored inputs and reference outputs, verified without torch."""

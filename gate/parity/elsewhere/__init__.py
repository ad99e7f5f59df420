"""What is computed on other machines: samples and probes go out, outputs come back."""

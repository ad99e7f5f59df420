"""A recording: what a runtime elsewhere answered, as a folder or a zip of `.npy` files."""

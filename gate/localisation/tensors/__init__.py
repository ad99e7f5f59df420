"""The tensors of the model against the constants of the file."""

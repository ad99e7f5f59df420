"""The samples, and which input they go to."""

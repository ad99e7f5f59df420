"""Samples: where they come from and which input they feed."""

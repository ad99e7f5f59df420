"""Streaming, mergeable statistics of two outputs."""

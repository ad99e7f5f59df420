"""Files, digests and serialized records."""

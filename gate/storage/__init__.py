"""Files, digests and records on the disk."""

"""A data set in fixed ranges of whole batches, whose statistics are folded by index."""

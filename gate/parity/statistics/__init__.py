"""Numbers of two outputs, streaming and mergeable."""

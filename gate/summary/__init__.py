"""One summary of a decision, rendered by every report surface."""

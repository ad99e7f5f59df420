"""Find the first layer that diverges, and why."""

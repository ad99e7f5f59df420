"""Render the summary for each surface."""

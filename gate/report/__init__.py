"""The decision and its evidence for people: terminal, Markdown, HTML, plots."""

"""Where a deployment stands: between two steps it may die, and nothing is lost."""


def step(name: str) -> None:
    """Does nothing. Tests put something here that kills the process, one step after the other."""

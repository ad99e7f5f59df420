"""Read samples from all sources, and bind them to model inputs."""

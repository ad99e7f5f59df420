"""A version's page in the registry: what people read there, and what a reviewer says there."""

"""The spec by one implementation a module."""

"""Promote exactly the bytes that were measured."""

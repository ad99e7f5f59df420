"""Append-only signed history in SQLite or PostgreSQL."""

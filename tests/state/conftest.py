"""State databases: an SQLite file, and PostgreSQL."""

from tests.service.conftest import database, postgres_server  # noqa: F401

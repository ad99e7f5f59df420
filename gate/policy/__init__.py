"""The policy: what must hold before a file is promoted."""

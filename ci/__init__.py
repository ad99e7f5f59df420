"""What a CI runs around `gate check`."""

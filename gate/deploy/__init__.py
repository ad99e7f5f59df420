"""Deploy verified bytes under a URL."""

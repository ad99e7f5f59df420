"""What a release is compared with: the version that serves, and whether it still does."""

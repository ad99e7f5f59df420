"""What must hold before a file is promoted."""

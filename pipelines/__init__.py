"""One thin module for each DVC stage."""

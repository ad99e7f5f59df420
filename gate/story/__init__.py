"""What a decision means: one story, made once, that every surface prints."""

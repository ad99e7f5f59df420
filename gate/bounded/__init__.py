"""Work on what strangers wrote, in a process of its own that ends within limits."""

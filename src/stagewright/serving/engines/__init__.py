"""One engine: its state, its KV cache, and how it moves on in time."""

"""What was traced: recordings of modules, and the chains of operations in them that are parts of
models."""

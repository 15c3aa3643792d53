"""Commands, one module each: its `ENTRY` is all that adding a command takes."""

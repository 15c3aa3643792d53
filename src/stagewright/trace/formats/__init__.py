"""File formats that a program is written in; `stagewright.trace.templates` makes the files."""

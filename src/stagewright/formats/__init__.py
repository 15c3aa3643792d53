"""File formats that a program is written in; `stagewright.stamp` makes the files."""

"""The time of a pipelined step for many configurations: orders of actions over (max, +)."""

"""Instances in pools: prompts and decode apart, instances of several kinds, one order of events."""

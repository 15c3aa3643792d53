"""Simulation of a step: issue order, timeline, breakdown and memory."""

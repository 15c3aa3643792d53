"""Models: their sizes and their kinds of layers.

In: the name of a preset or a published config.json. Out: a `ModelConfig`, one frozen value.
"""

"""What a model is made of: its sizes and its kinds of layers.

In: the name of a preset or a published config.json. Out: a `ModelConfig`, one frozen value.
"""

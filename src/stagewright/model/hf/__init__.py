"""Readers of the config.json files that are published with models' weights.

In: a JSON object. Out: the fields of a `ModelConfig`; a key that is not understood is refused.
"""

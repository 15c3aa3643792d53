"""Readers of the config.json files that are published with models' weights.

In: a JSON object. Out: the fields of a `ModelConfig`; a key that is not understood is named in a
note (`unread`); a value that is known not to be countable is refused (`Family.only`).
"""

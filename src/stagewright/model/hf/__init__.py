"""Readers of the config.json files that are published with models' weights.

In: a JSON object. Out: the fields of a `ModelConfig`. A key that is not understood is named in a
note; a value that is known not to be countable is refused (`Family.only`).

- `read`: the model of a file
- `families`: the architectures that can be read, a row each, by maker
- `keys`: the keys of a file, and what a row consists of
- `parts`: maps and readers that several families share
- `unknown`: classes that nobody knows, read by common names
- `quantization`: storage of the weights in few bits
"""

"""Models: their sizes and their kinds of layers, one frozen `ModelConfig` each.

- `fields`: annotations of fields, and the rules that follow from them
- `layers`: kinds of layers, and nested sizes (states, shared blocks, images, users' modules)
- `architecture`: the fields of a model
- `checks`: the rules that they satisfy together
- `config`: the checked model, `ModelConfig`
- `presets`: models by name, from `data/models`
- `hf`: readers of published config.json files
- `hub`: the local cache of the Hugging Face hub
- `catalog`: the model that a name, a path or an id of the hub stands for
- `json`: a model in a manifest
"""

"""PyTorch modules as models: a recorded forward pass becomes the text of a `.stg` file.

In: what `torch.export` records of a module on tensors without values, as a `Recording`. Out:
modules in the paper's notation, one for each kind of layer, from which gradient, layouts and traces
follow as for a text that a person writes. `record` alone imports torch; all else is a function of a
recording, which can be kept as JSON.
"""

"""PyTorch modules as models: a recorded forward pass becomes the text of a `.stg` file.

In: what `torch.export` records of a module on tensors without values, as a `Recording`
(`recording`), which can be kept as JSON. Out: modules in the paper's notation, one for each kind of
layer, from which gradient, layouts and traces follow as for a text that a person writes.

`sources` takes a module, a file or a config.json. `record` alone imports torch; `saved` reads saved
programs without running anything in them. `masks` finds the kind of a constant mask. `translate`
calls the steps: `rewrite` finds norms, rotary positions, gates and experts; `ops` makes calls of
ops; `attention` fuses attention written in parts; `layers` finds repeated layers; `axes` splits
dims; and `stg_writer` writes the text, with `expressions` of indices, `projections` that are split,
and the degrees that split parameters (`placement`). `rank_graph` records what one rank of a process
group does, from which `lower.traced_graph` makes a program.
"""

"""Blocks and models that users write in text, without Python: `.stg` files.

In: statements such as `y = einsum[bsm,mf->bsf](x, w)`. Out: modules that the builder takes as parts
of a layer, and a `ModelConfig` that names them.
"""

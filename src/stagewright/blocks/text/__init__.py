"""Blocks and models that users write in text, without Python: `.stg` files.

In: statements such as `y = einsum[bsm,mf->bsf](x, w)`. Out: modules that the builder takes as parts
of a layer, and a `ModelConfig` that names them. `stg` reads the file, `modules` fits a module into
a layer or chain, `statements` builds its nodes at each use; `operators` has the chains of PyTorch's
operators for frameworks that fuse nothing.
"""

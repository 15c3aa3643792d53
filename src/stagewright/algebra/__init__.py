"""Sizes, index expressions and layouts: the arithmetic of everything above.

`size` has exact symbolic sizes, products and sums of letters such as `M`. `index` reads an index
expression such as `bsm,mf->bsf`, from which an op's shape, FLOPs and layout follow. `layout` has
the layout of a value on a mesh of ranks, and the moves (collectives) between two layouts.
`notation` reads and writes tensors as the paper does: `x[B/dp, S, H @ 1/tp]`.
"""

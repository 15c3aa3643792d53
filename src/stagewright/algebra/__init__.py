"""Sizes, index expressions and layouts: the arithmetic of everything above.

In: letters and numbers (`M`, `bsm,mf->bsf`, `[B/dp, S, H @ 1/tp]`). Out: exact symbolic sizes, the
dims that an index expression binds, and the moves (collectives) between two layouts of a value.
"""

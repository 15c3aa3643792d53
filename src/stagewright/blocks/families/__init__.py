"""Blocks that only some families of models have.

In: a `Builder`, as for every layer. Out: blocks by name for `blocks.chain`. `vision`: images, and
towers before the text. `encoder_decoder`: T5. `mtp` and `drafts`: several tokens ahead, in training
and to draft. `shared`: blocks of several layers (Zamba2). `streams`: several residual streams.
`compressed`: attention to compressed keys (DeepSeek-V4).
"""

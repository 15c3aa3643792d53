"""Writing programs: a file for each rank, or one bundle of them all.

In: a `Program`. Out: a directory of Chakra, JSON or dot files, or a bundle, with a manifest; whole
or not there at all, and the same bytes whatever the number of workers.
"""

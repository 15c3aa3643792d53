"""Writing programs: a file for each rank, or one bundle of them all.

In: a `Program`. Out: a directory of Chakra, JSON or dot files, or a bundle, with a manifest; whole
or not there at all, and the same bytes whatever the number of workers.

`write` writes a program, or ranks of a bundle. `templates` makes the files of ranks that share one,
by the writers of `formats`; `staging` renames a finished directory. `manifest` is the file beside
the traces, `run_manifest` what it says of a run, and the way back from it to the run.
`traced_bundle` has bundles of PyTorch graphs that `import` recorded.
"""

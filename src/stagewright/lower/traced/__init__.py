"""Program of one rank from a graph that PyTorch recorded there, instead of from our blocks.

In: a recording with a process. Out: a `Program` of one class of ranks: the mesh from the process
groups (`mesh`), kernels and collectives from the nodes (`kernels`), order and memory (`program`).
"""

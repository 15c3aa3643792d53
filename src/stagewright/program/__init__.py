"""Program of every rank as columns of numbers, between lowering and all its readers.

`columns.Program` has one `RankClass` for all ranks that do the same work with other partners, so
that 100,000 ranks cost as much as one. The work of a class (`RankWork`) is a table of distinct
actions, each row once, and the order of their copies; a forward or a backward of one stage for one
microbatch is a copy. Simulation, memory and checks of a step read the actions; rows of all copies
(`RankWork.tasks`, a `Tasks`) are made when a trace or a table asks for them. A row names its
partners by slot: `communicators` turns a slot and a rank into a group or a peer by arithmetic on
the mesh. Simulation, search and views, not traces, ask `comm_axes` for the parallel degrees that a
row communicates along; `traffic` adds up the bytes between ranks. `Values` says between which rows
each value lives, `MemoryChanges` what each row allocates and frees; `memory` has samples of the
bytes in use, `fit` compares peaks with a device. `shapes` is what a kernel's duration follows from.
`fold` shrinks a program to the fewest ranks that any check needs.

Start with the docstrings of `columns.Tasks` and `columns.Actions`.
"""

"""Recorded steps: traces of PyTorch's profiler, read, linked, replayed, and written for Chakra.

One file of the profiler is one rank. Its way through the room:

- `rank`: `RankTrace`, what all else works on. Kernels, the calls that launched them, and the ops
  that made these calls are plain objects with times in whole nanoseconds;
- `read`: files, archives and folders of Kineto's JSON; `perfetto`: of Perfetto's `.pftrace`;
- `events`: the events of a file to a `RankTrace`, cut to a step;
- `kernels`: the type of each kernel: products with m, n, k, attention, collectives with bytes;
- `ranks`: several ranks on one clock; transfer and waiting of each collective;
- `link`: the graph of host segments, waits and kernels: who waits for whom;
- `replay`: the graph executed again, as recorded or with a change;
- `steps`: one step of each rank, each nanosecond of it in one part: products, waiting, launches...;
- `compare`: a measured step beside a simulated one, which `views.kineto` gives the same form;
- `calibrate`: figures of a hardware file from the durations of kernels and transfers;
- `to_program`: the kernels of all ranks as a `Program`, which the trace writers take.

Shapes and names of data types are those of `program.columns`, so that a recorded kernel and one of
a simulated step can be compared.
"""

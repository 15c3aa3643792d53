"""Seconds of kernels, collectives, messages and steps of a program on a machine.

A *machine* (`network.Machine`) is a number of GPUs of one hardware and the network tiers between
them. Hardware is data (`hardware`): figures of a device and its links, and constants that were
fitted to measured kernels. `durations.task_seconds` asks for the seconds of each task in isolation:

- A *kernel* gets its seconds from its shape, by the model of its op (`roofline`): a matrix product
  from its tiles, attention from its queries and keys, everything else from its bytes. Frameworks
  run some kernels otherwise than the graph has them: products of one input are one GEMM
  (`fused_gemms`), and experts need copies and biases that the graph lacks (`expert_kernels`).
- A *collective* gets its seconds from its bytes and from where its group lies in the tiers
  (`network.Placement`, in a torus `torus`), by the fastest algorithm of those that apply: ring,
  tree, tier after tier, direct, in switches (`collectives`). Libraries of expert parallelism send
  tokens once for several experts (`dispatch`).
- A *message* between pipeline stages gets its seconds from its bytes and the outermost tier that it
  crosses (`collectives.message_seconds`).
- A measured duration in a file of the user replaces any of these (`measured`).

Three modules change isolated durations because of what runs at the same time: `dispatch` slows
kernels down while tokens are sent, `tp_overlap` hides collectives of tensor parallelism behind
their products, `engines` knows what serving engines fuse and overlap. The package `simulate` puts
the durations into streams and gives the time of a step. From that follow power and energy
(`power`), US dollars (`ownership`), and the time of a whole `job`, of which `goodput` is the useful
share. `astra_sim` describes the same machine to another simulator.
"""

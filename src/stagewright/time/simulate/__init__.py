"""Simulation of a step on a machine: times, breakdown, memory and utilization.

How the time of a step comes about:

1. `step.timeline_of_step` takes a compiled run and a machine. `time.durations` gives the duration
   of each row of each distinct action, and `launches` what its launch costs the host.
2. `timeline.timeline` turns these into a timeline of all ranks. Times are integers, in ticks.
3. Ranks with equal times are one *lane* (`lanes`), and only lanes are simulated.
4. A rank issues *units*: mostly one copy of an action, such as the forward of one microbatch
   (`units`). Distinct units have their rows once, whatever ranks and microbatches issue them.
5. `order` puts the rows of a unit in the order in which a framework issues them (`ep_overlap`: of
   two microbatches in turn). `rules` gives each
   row its stream, and what it waits for: rows of its unit, or *registers*, which hold the last end
   on each stream before the unit.
6. Units are cut into *fragments* at collectives of several lanes. The end of a row is the latest of
   some inputs plus durations, so a fragment is a (max, +) matrix from its input times, mostly
   registers and arrivals of messages, to its output times (`transfer`).
7. `messages` finds who sends to whom. `plan` says where in one array the inputs and outputs of each
   fragment of each class are; it follows from structure alone.
8. `execute` lets each class issue its fragments in order: it waits for messages and other members
   of collectives, multiplies the inputs by the matrix, and writes the outputs. The latest is the
   end of the step.
9. Start and end of a single task are a row of a matrix times the inputs of its fragment, on demand:
   for `memory` over time, and for all tasks of a rank (`expand`), on which `breakdown` and the
   critical path rest.
10. `steady` simulates decode on a pipeline as one of many steps; `step.SimulatedStep` holds the
    results, with `utilization`, `power_over_time` and metrics of `serving`.
"""

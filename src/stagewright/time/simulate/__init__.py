"""Simulation of a step on a machine: times, breakdown, memory and utilization.

`step.timeline_of_step` gives each row of each distinct action a duration (`time.durations`) and the
cost of its launch (`launches`); `timeline.timeline` turns these into times of all ranks, in ticks:

1. Ranks with equal times are one *lane* (`lanes`). A rank issues *units*: mostly one copy of an
   action (`units`). Distinct units have their rows once.
2. `order` puts the rows of a unit in the order in which a framework issues them (`ep_overlap`: of
   two microbatches in turn); `rules` gives each its stream, and what it waits for.
3. Units are cut into *fragments* at collectives of several lanes; each is a (max, +) matrix from
   input times to output times (`transfer`). `messages` finds who sends to whom, `plan` where inputs
   and outputs are in one array of times.
4. `execute` lets each class issue its fragments in order: it multiplies the inputs by the matrix.

Times of single tasks are computed on demand: for `memory` over time, and for all tasks of a rank
(`expand`), on which `breakdown` and the critical path rest. `steady` simulates decode on a pipeline
as one of many steps; `step.SimulatedStep` holds the results, with `utilization`, `power_over_time`
and metrics of `serving`. docs/internals/simulation.md explains each move.
"""

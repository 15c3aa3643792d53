"""From blocks as tasks and the order of a schedule to the program of every rank.

| class | module | what it is, in the order in which they are made |
|---|---|---|
| `LoweredBlock`, `StageBlock` | `lowered_block` | tasks of a block, its values; it in a stage |
| `Stage` | `stages` | rows of a stage: three `Segment`s, forward, backward and updates |
| `StageValues` | `stage_values` | values of a stage, and the rows that touch each |
| `ActionTable` | `distinct_actions` | rows of all distinct actions, copied from those of segments |
| `RankSchedule`, `RankOrder` | `rank_order` | actions of a rank; copies that execute them |
| `ValueColumns` | `live_ranges` | values of a rank, and their live ranges |
| `AssembledWork` | `work` | work of a rank class: rows, values and memory when they are read |

`assemble` calls these in order. Stages with equal blocks share a `Stage` (`StageKey`); those whose
messages go equally far are of one *stage class* of a program. No segment (`segments`), action or
row of the table depends on the number of microbatches. On the number of ranks depend only slots of
mirrored and tied groups, and shifts of messages.

A `RowRefs` names a row by (stage distance, pass part, segment row), since ranks and microbatches
are not known yet. `habit` has the points where frameworks differ, `optimizer_step` the last action
of a rank, `streams` the ordering edges of traces (Chakra's ctrl_deps).

Coordinates: `segment_row` is a row of a `Segment`, `row` a row of `Actions.tasks` or of a rank,
`local_stage` the index of a stage on its rank.
"""

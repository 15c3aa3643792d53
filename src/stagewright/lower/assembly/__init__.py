"""From blocks as tasks and the order of a schedule to the program of every rank.

| type | made by | what it is |
|---|---|---|
| `Placed` | `lowered_block` | kernels of a block, placed in the pipeline |
| `Segment` | `stages` (`ActionRows`) | rows of a stage class in one direction |
| `Actions` | `distinct_actions` (`ActionTable`) | rows of all distinct actions |
| `RankOrder` | `rank_order` | copies of actions that a rank executes |
| `AssembledWork` | `work` | rows (`expand`) and memory (`live_ranges`, `rank_values`) of a rank |
| `Program` | `assemble` | all rank classes |

Coordinates: `segment_row` is a row of a `Segment`, `row` a row of `Actions.tasks` or of a rank,
`local_stage` the index of a stage on its rank.
"""

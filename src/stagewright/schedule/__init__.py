"""Pipeline schedules: which rank runs forward or backward of which stage, in which order.

An *action* such as `2F0` is the forward (F), the backward (B), or a half of the backward (I: input
gradient, W: weight gradients) of one stage for one microbatch; an *order* is a list of actions for
each pipeline rank (`actions`). Sends, receives and idle time are not stored: they follow from what
an action needs, and from the rank of each stage (`places`). An order is made by a function of the
numbers of ranks, microbatches and stages per rank: `generators` has 1F1B and its relatives and the
V-shaped ones, `controllable_memory` V-Half and V-Min, `vocabulary` those that share the embedding
and the output layer; or it is read from CSV (`text`). `schedules.SCHEDULES` names them, with the
sizes that each accepts; `make` checks the sizes and returns the order. `play.plan` sorts the steps
of an order by their needs, or explains a deadlock; `play.ends` gives the end of each step for costs
that are numbers or arrays (one entry per candidate of a search). `play.validate` checks that an
order does all work once and ends. `text.text` prints an order as a picture, `text.to_csv` as CSV.
To add a schedule, write its function and a row of `SCHEDULES`; test its idle time in closed form.
"""

"""Search the best execution of a model on a machine.

A candidate is a row of `candidates`: a run with its execution and hardware, a column per setting.
`request` reads what the user fixes, `lists` or ranges; `defaults` gives values to the other
settings, `machines` the hardware and numbers of GPUs. `space` crosses all values, and removes the
combinations that `constraints` refuses as a run would. `estimate` estimates the time and memory of
each candidate: it simulates its pipeline schedule (`pipelines`) on the costs of single blocks
(`block_costs`), which come from exact simulations of tiny runs (`tiny_step`). Spaces of few
candidates are not estimated. `search` simulates candidates exactly (`simulated`), best estimate
first, until no estimate can win. `figures` has the metrics of all candidates, `objectives` what is
compared, and `ranking` the order: the first of its list is the answer, next to the best of each
other layout. `choices` has the rows of the second printed table, `sensitivity` what a faster part
of the hardware would bring. `run_file` writes a candidate for other commands.
"""

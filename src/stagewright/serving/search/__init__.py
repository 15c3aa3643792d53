"""Search for the cheapest deployment of a load, by simulation.

`layouts` makes the space of one instance's layouts. For each of them `search` makes step times and
asks `bounds` whether it can keep the limits at all, and for a first guess of instances; then it
simulates numbers of instances until the fewest are known, and promising `pairs` of layouts for
prompts and decode. `load` simulates one deployment for as long as it takes to tell. `run_files`
writes what was found for `stagewright serve`.
"""

"""The public functions, a module each, and the objects with views that they return.

>>> import stagewright as sw
>>> compiled = sw.compile("llama3-8b", tp=8, seq_length=4096)
>>> found = sw.simulate(compiled, "h100-sxm")
>>> found.seconds == sw.simulate("llama3-8b", "h100-sxm", tp=8, seq_length=4096).seconds
True

A run is given as the name of a model with settings (the fields of `Run`), as a `Run`, or as the
result of `compile`. Errors are `UserError`s that say what to change. The package exports the
functions; a module imports what its own function needs, so that traces are written without a chart.

- Runs: `experiments` (`load_run`, `read_launch`), `compiled` (`compile`), `generated` (`generate`),
  `simulated` (`simulate`, `report`), `searched` (`search`).
- Requests over time: `served` (`serve`) and `searched_serving` (`search_serving`). They read
  `workloads`, `deployment` and `stages` from settings, of which files hold lists (`rows`).
- Two runs beside each other: `changes` (`diff`).
- Recorded steps: `calibrated`, `compared` and `replayed`.
- `result` is the base of all that is returned: text, tables, JSON and files.
"""

"""Views of results: summaries, tables, advice, pages and pictures.

In: what `lower` compiled and `time` simulated. Out: text, JSON, HTML and SVG. Computes no figures.

- What a command prints: `summary` (`show`), with its `tables`; `step` (`simulate`), `search`,
  `serving`, `search_serving`, `changes` (`diff`), `compared`, `replayed`, `models`.
- Remarks: `advice` on a run, `accuracy` to expect, `deviations` that are known.
- Timelines for other viewers: `perfetto`, and `kineto` in the format of PyTorch's profiler.
- `pages` of HTML, made of `pictures`.
"""

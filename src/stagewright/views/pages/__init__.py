"""Pages of HTML that stand alone: one file, no network, readable on paper and without a script.

`html` makes a page of its parts, and `charts` the pictures of a run. Pages: `report` of a run with
its `settings`, `compare` of several, `search`, `serving`.
"""

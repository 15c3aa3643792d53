"""Pictures as SVG text, for pages and notebooks: drawn by hand, the same bytes each time.

A picture stands alone: its colours are fixed and its text takes the colour of what is around it, so
that it can be read on a light page, a dark one and on paper. What colours say, patterns or words
say too. `name` keeps the ids of one picture apart from those of others on the same page.

`svg` has the parts of pictures, `scales` axes and ticks, `colours` a colour for each meaning.
Pictures: `bars`, `curves`, `memory`, `scatter`, `schedule` and `timeline`.
"""

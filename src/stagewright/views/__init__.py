"""Views of results: summaries, tables, advice, pages and pictures.

In: what `lower` compiled and `time` simulated. Out: text, JSON, HTML and SVG. Computes no figures.
"""

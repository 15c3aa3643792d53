"""Pages of HTML that stand alone: one file, no network, readable on paper and without a script."""

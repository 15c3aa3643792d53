"""Evidence: predictions beside published measurements, and this machine's state.

In: tables of measurements with their sources. Out: predictions, errors, and what `doctor` finds.
"""

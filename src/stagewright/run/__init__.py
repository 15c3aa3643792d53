"""What is asked for: the settings of a run, and whether they can be had together.

In: options of the command line, keyword arguments or a YAML file. Out: a `Run`, one frozen value
that has been checked against its model.
"""

"""Settings of a run, its machine and its execution, and the rules that say which go together.

In: options of the command line, keyword arguments or a YAML file. Out: a `Run`, one frozen value
that has been checked against its model.
"""

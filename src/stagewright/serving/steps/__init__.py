"""How long a step of any batch takes: tables from kernels in columns, and plain numbers of them.

In: a `Run` of inference and its machine. Out: `StepTimes`, a function of new tokens, query-key
pairs, cached keys and requests that an event loop asks in about a microsecond.
"""

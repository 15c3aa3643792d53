"""File formats that a program is written in; `stagewright.trace.templates` makes the files.

In: a program, and ranks. Out: batches of ranks whose files share a template. `plan` of a module
makes the batches; `FILE` is the name of a rank's file. Formats: `chakra`, with the schema `et_def`
and the encoder `wire`; `json`; `dot`. A `bundle` is a program in one file, read as an `archive`.
"""

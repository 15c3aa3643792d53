"""The command line: options, help, progress. Everything it does, `stagewright.api` does.

Slow imports happen inside the commands, so that `--help` answers quickly.
"""

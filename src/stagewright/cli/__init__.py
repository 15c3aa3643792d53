"""The command line: options, help, progress. Everything it does, `stagewright.api` does.

`main` lists the commands (`commands`, a module each). `command` makes a function a command with
help in sections. `options` makes options of the declarations of settings, with `option_types`;
`words` explains mistyped ones. `runs` turns a command line into a run and its result into an exit
code. `output` prints notes, results and tables, `progress` a bar on stderr.

Slow imports happen inside the commands, so that `--help` answers quickly.
"""

"""Settings of a run, its machine and its execution, and the rules that say which go together.

In: options of the command line, keyword arguments or a YAML file. Out: a `Run`, one frozen value
that has been checked against its model.

- `sections`: the settings, each declared once, with their sections and help;
- `files`: run files and manifests as settings by name; `other_names`: names of other tools;
- `settings`: the `Run`; `experiment`: a run with its machine and execution;
- `pipeline_split`: layers of each stage;
- `tool_files`: runs as files of other tools;
- `rules`: the check, by `rule`s of the model and of each mode (`model_rules`, `training_rules`,
  `serving_rules`); `validation`: errors of single values; `notes`: settings without effect;
- `requests` and `lengths`: the batch of an inference step, and what each rank has of it;
  `expert_load`: files of the tokens that each expert gets.
"""

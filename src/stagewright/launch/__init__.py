"""Files of other tools, read as runs and models: launch scripts, recipes and server commands.

A file is recognised by its content (`files`). Scripts are parsed and never run (`lexer`,
`arithmetic`, `shell`). Each tool has a table of its flags in `data/launch` (`tables` says how they
read) and a module for what follows from several flags: `megatron`, with slime; `recipes`, with
torchtitan, DeepSpeed and Accelerate; `trainer`, with Hugging Face's Trainer; `alignment`, with
Megatron-Bridge, verl, NeMo-RL and OpenRLHF; `servers`, with vLLM, SGLang, TensorRT-LLM and their
clients. `reading` turns flags into the result: settings by our names, a model, and for each flag
what it means or why it is ignored. `names` has other tools' names that our options and run files
take, too, and finds the flag that `--as` writes for a setting. `recipe_functions` has torchtitan's
configurations in Python as keys. `run.tool_files` and `serving.command_lines` write.

To add a tool: a CSV in `data/launch`, a module with a `Tool`, and a place in `files.TOOLS`.
"""

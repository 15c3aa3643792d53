"""Schedulers of serving engines, a module each: a class with one method (`engine.Scheduler`).

`vllm`, `sglang`, `tensorrt_llm` and `static` batching. `named` finds them, and those of other
packages, by name.
"""

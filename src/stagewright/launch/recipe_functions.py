"""Configurations of torchtitan, functions of Python, as keys and values; nothing is run.

>>> lines = ["def small() -> Trainer.Config:", "    config = llama3_8b()",
...          "    config.training.max_context_length = 2 * 2048", "    return config"]
>>> keys_of("\\n".join(lines), "small.py", {})
{'config': 'llama3_8b', 'training.max_context_length': 4096}
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from stagewright.errors import UserError


def keys_of(text: str, path: str, variables: Mapping[str, str] | None) -> dict[str, Any] | None:
    """Keys that a function sets, with dots; None: no function returns a `Trainer.Config`.

    `CONFIG` of `variables` names one of several; without variables the first is read. `config` is
    the function that it begins with.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    functions = {
        of.name: of for of in tree.body
        if isinstance(of, ast.FunctionDef) and of.returns
        and ast.unparse(of.returns).endswith("Trainer.Config")
    }  # fmt: skip
    imported = [of for of in tree.body if isinstance(of, ast.ImportFrom)]
    modules = {
        name.asname or name.name: f"{of.module}.{name.name}".replace(".config_registry", "")
        for of in imported for name in of.names
    }  # fmt: skip
    if not functions:
        return None
    first = next(iter(functions))
    variables = {"CONFIG": first} if variables is None or len(functions) == 1 else variables
    name = variables.get("CONFIG", "")
    if name not in functions:
        names = ", ".join(functions)
        raise UserError(f"{path}: has {names}; give one: --set CONFIG={first}")
    try:
        return _Function(functions, modules, {}).read(functions[name])
    except RecursionError:
        raise UserError(f"{path}: {name} is nested too deep for a configuration") from None


class _Function:
    """Keys of a function, after those of the one that it begins with."""

    def __init__(
        self,
        functions: Mapping[str, ast.FunctionDef],
        modules: Mapping[str, str],
        done: dict[str, dict[str, Any]],
    ) -> None:
        """`done`: keys by function, so that each is read once."""
        self.functions, self.modules, self.done = functions, modules, done
        self.keys: dict[str, Any] = {}
        self.local: dict[str, ast.expr] = {}

    def read(self, function: ast.FunctionDef) -> dict[str, Any]:
        """Keys in the order of their assignment."""
        for node in function.body:
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                self.put("", node.value)
            if not isinstance(node, ast.Assign):
                continue
            name, _, key = ast.unparse(node.targets[0]).partition(".")
            value = node.value
            if key:
                self.put(key, value)
            elif isinstance(value, ast.Call) and not (value.args or value.keywords):
                called = ast.unparse(value.func)
                if called in self.functions and called != function.name:
                    if called not in self.done:
                        others = {k: v for k, v in self.functions.items() if k != function.name}
                        inner = _Function(others, self.modules, self.done)
                        self.done[called] = inner.read(self.functions[called])
                    self.keys |= self.done[called]
                else:
                    module = self.modules.get(called, called).split(".")
                    self.keys["config"] = ".".join(module[-2:])
            else:
                self.local[name] = value
        return self.keys

    def put(self, key: str, value: ast.expr) -> None:
        """Set a key, or those below it."""
        if isinstance(value, ast.Name):
            value = self.local.get(value.id, value)
        if not isinstance(value, ast.Call):
            self.keys[key] = _plain(value)
            return
        called, dot = ast.unparse(value.func), "." if key else ""
        if key and not called.endswith("Config"):
            for keyword in value.keywords:
                if keyword.arg == "converters" and isinstance(keyword.value, ast.List):
                    names = [ast.unparse(item).partition(".")[0] for item in keyword.value.elts]
                    self.keys[f"{key}.converters"] = names
        elif key and called.endswith(".Config"):
            self.keys[key] = f"{called}()"
        for keyword in value.keywords if called.endswith("Config") else ():
            self.put(f"{key}{dot}{keyword.arg}", keyword.value)


def _plain(value: ast.expr) -> Any:
    """A number, text or product of numbers; other expressions as they are written."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        left, right = _plain(value.left), _plain(value.right)
        if isinstance(left, int) and isinstance(right, int):
            return left * right
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError):
        return ast.unparse(value)

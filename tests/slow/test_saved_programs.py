"""Malicious `.pt2` archives: an import runs nothing that a saved program holds."""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stagewright.cli.main import main
from stagewright.errors import UserError
from stagewright.imports.sources import recorded

torch: Any = pytest.importorskip("torch", reason="needs the extra: pip install -e '.[torch]'")
nn: Any = torch.nn

pytestmark = [pytest.mark.slow, pytest.mark.extra, pytest.mark.filterwarnings("ignore")]

Members = dict[str, bytes]
VERSIONED = "2.7 or older"

if True:  # the module needs torch to be defined

    class Masked(nn.Module):
        """A parameter, a buffer, a constant and a size that varies."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
            self.register_buffer("mask", torch.ones(16))

        def forward(self, x: Any) -> Any:
            h = torch.relu(self.a(x)) * self.mask + torch.tensor([0.5] * 16)
            return self.b(torch.cat([h, h], 0)).sum()


class Command:
    """An object whose unpickling runs a command of the shell."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return __import__("os").system, (self.command,)


def evil(command: str) -> bytes:
    """A file of `torch.save` that runs a command when it is unpickled."""
    buffer = io.BytesIO()
    torch.save(((Command(command),), {}), buffer)
    return buffer.getvalue()


def members(path: Path) -> Members:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write(path: Path, changed: Members, root: str = "saved/") -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in changed.items():
            archive.writestr(root + name, content)


def saved(path: Path) -> Members:
    vary = torch.export.Dim.DYNAMIC
    program = torch.export.export(Masked(), (torch.zeros(4, 16),), dynamic_shapes=({0: vary},))
    torch.export.save(program, path)
    return members(path)


def _document(change: Callable[[str, str], str]) -> Callable[[Members, str], None]:
    """A change of the graph's JSON; the command is `touch` of a file."""

    def changed(archive: Members, command: str) -> None:
        before = archive["models/model.json"].decode()
        after = change(before, command)
        assert after != before
        archive["models/model.json"] = after.encode()

    return changed


def _payload(folder: str, name: str, **how: Any) -> Callable[[Members, str], None]:
    """The first tensor of a folder as a pickled object."""

    def changed(archive: Members, command: str) -> None:
        (file,) = [n for n in archive if n.endswith(f"{folder}_config.json")]
        config = json.loads(archive[file])
        first = next(iter(config["config"].values()))
        first |= {"path_name": name, "use_pickle": True} | how
        archive[file] = json.dumps(config).encode()
        content = evil(command)
        if name.startswith("opaque"):
            content = pickle.dumps(Command(command))
        archive[f"data/{folder}/{name}"] = content

    return changed


def _sample_inputs(archive: Members, command: str) -> None:
    archive["data/sample_inputs/model.pt"] = evil(command)


def _first_format(folder: str) -> Callable[[Members, str], None]:
    def changed(archive: Members, command: str) -> None:
        archive[f"data/{folder}/model.pt"] = evil(command)

    return changed


def _as_size(text: str, command: str) -> str:
    size = json.dumps(f"__import__('os').system({command!r})")
    return re.sub(r'"expr_str": "Symbol[^"]*"', lambda _: f'"expr_str": {size}', text)


def _as_name(text: str, command: str) -> str:
    """A default value of an argument, which is evaluated where the graph is compiled."""
    return text.replace('"x"', json.dumps(f"x=__import__('os').system({command!r})"))


def _as_operation(target: str) -> Callable[[str, str], str]:
    return lambda text, command: text.replace("torch.ops.aten.relu.default", target)


def _as_import(text: str, command: str) -> str:
    """An enum of a module that is imported by name: here one that draws in a window."""
    context = json.dumps({"__enum__": True, "fqn": "antigravity:x", "name": "y"})
    spec: list[Any] = [1, {"type": "builtins.dict", "context": context, "children_spec": []}]
    document = json.loads(text)
    for call in document["graph_module"]["module_call_graph"]:
        if call["signature"]:
            call["signature"]["in_spec"] = json.dumps(spec)
    return json.dumps(document)


ARCHIVES: dict[str, tuple[Callable[[Members, str], None], str, bool]] = {
    "sample inputs": (_sample_inputs, "", True),
    "weights": (_payload("weights", "weight_9"), "weight_9 holds more than tensors", True),
    "weights of the first archives": (_first_format("weights"), "holds more than tensors", True),
    "constants": (_payload("constants", "tensor_9"), "tensor_9 holds more than tensors", True),
    "constants of the first archives": (
        _first_format("constants"), "holds more than tensors", True,
    ),
    "opaque objects": (_payload("constants", "opaque_obj_0"), "is an object", True),
    "custom objects": (_payload("constants", "custom_obj_0"), "is an object", False),
    "a size": (_document(_as_size), "the graph has the size .__import__", True),
    "a name": (_document(_as_name), "the graph has the name", False),
    "an operation": (
        _document(_as_operation("torch.os.system")), "the graph calls 'torch.os.system'", False,
    ),
    "an operation that opens files": (
        _document(_as_operation("torch.ops.aten.from_file.default")),
        r"the graph calls 'torch\.ops\.aten\.from_file\.default'", False,
    ),
    "an attribute of an operation": (
        _document(_as_operation("torch.ops.load_library")), "the graph calls", False,
    ),
    "an import": (_document(_as_import), "", False),
}  # fmt: skip
"""What is changed in an archive, the reason of the refusal (none: it is not read), and whether
`torch.export.load` runs the command."""


@pytest.mark.parametrize("kind", ARCHIVES)
def test_no_command_of_an_archive_runs(kind: str, tmp_path: Path):
    change, reason, runs = ARCHIVES[kind]
    path, marker = tmp_path / "evil.pt2", tmp_path / "ran"
    archive = saved(path)
    change(archive, f"touch {marker}")
    write(path, archive)
    with pytest.raises(SystemExit) as stop:
        main(["import", str(path), "-o", str(tmp_path / "x.stg")])
    assert not marker.exists()
    if reason:
        assert stop.value.code == 2
        with pytest.raises(UserError, match=reason) as error:
            recorded(str(path))
        assert str(error.value).endswith("give --trust if you trust its author")
    else:
        assert stop.value.code == 0
    assert not marker.exists()
    if runs:  # the archive is what it claims to be
        with suppress(UserError):
            recorded(str(path), trust=True)
        assert marker.exists()


def test_archives_of_an_older_format_are_refused(tmp_path: Path):
    path, marker = tmp_path / "evil.pt2", tmp_path / "ran"
    saved(path)
    serialize: Any = pytest.importorskip("torch._export.serde.serialize")
    content = serialize.serialize(torch.export.load(path))
    major, minor = content.exported_program and serialize.SCHEMA_VERSION
    write(
        path,
        {
            "version": f"{major}.{minor}".encode(),
            "serialized_exported_program.json": content.exported_program,
            "serialized_state_dict.pt": evil(f"touch {marker}"),
            "serialized_constants.pt": content.constants,
            "serialized_example_inputs.pt": content.example_inputs,
        },
        root="",
    )
    with pytest.raises(UserError, match=VERSIONED):
        recorded(str(path))
    assert not marker.exists()
    with pytest.raises(UserError):
        recorded(str(path), trust=True)
    assert marker.exists()


def test_compiled_code_of_an_archive_is_not_loaded(tmp_path: Path):
    path = tmp_path / "evil.pt2"
    archive = saved(path)
    archive["data/aotinductor/model/model.wrapper.so"] = b"\x7fELF"
    write(path, archive)
    assert recorded(str(path)).parameters == 16 * 16 * 2 + 16


def test_a_trusted_program_is_read_as_any_other(tmp_path: Path):
    path = tmp_path / "saved.pt2"
    saved(path)
    assert recorded(str(path)).to_json() == recorded(str(path), trust=True).to_json()

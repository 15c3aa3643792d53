"""Chakra traces as lists of official messages, to be changed by hand and written back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stagewright.lower.compile import compile
from stagewright.run.settings import Run
from stagewright.trace.formats import et_def, wire
from stagewright.trace.write import write

INVALID, METADATA, LOAD, STORE, COMP, SEND, RECV, COLL = range(8)


class Trace:
    """A file: its metadata and its nodes."""

    def __init__(self, metadata: Any, nodes: list[Any]) -> None:
        self.metadata, self.nodes = metadata, nodes

    def of(self, type_: int) -> list[Any]:
        """The nodes of a type."""
        return [node for node in self.nodes if node.type == type_]

    def by_id(self, id_: int) -> Any:
        """The node of an id."""
        (node,) = (node for node in self.nodes if node.id == id_)
        return node

    def remove(self, node: Any) -> None:
        """Take a node out; what needed it then needs what it needed."""
        self.nodes.remove(node)
        for other in self.nodes:
            for name in ("data_deps", "ctrl_deps"):
                deps = getattr(other, name)
                if node.id in deps:
                    deps.remove(node.id)
                    deps.extend(d for d in getattr(node, name) if d not in deps)

    def encode(self) -> bytes:
        """The file."""
        bodies = [m.SerializeToString() for m in (self.metadata, *self.nodes)]
        return b"".join(wire.varint(len(body)) + body for body in bodies)


class World:
    """A directory: a file per rank, and the groups."""

    def __init__(self, ranks: dict[int, Trace], groups: dict[str, Any] | None) -> None:
        self.ranks, self.groups = ranks, groups

    def __getitem__(self, rank: int) -> Trace:
        return self.ranks[rank]

    def everywhere(self) -> Iterator[Any]:
        """Every node of every rank."""
        for trace in self.ranks.values():
            yield from trace.nodes

    def save(self, folder: Path) -> Path:
        """Write it."""
        folder.mkdir(exist_ok=True)
        for rank, trace in self.ranks.items():
            (folder / f"workload.{rank}.et").write_bytes(trace.encode())
        if self.groups is not None:
            (folder / "comm_group.json").write_text(json.dumps(self.groups))
        return folder


def read_messages(path: Path) -> tuple[Any, list[Any]]:
    """An oracle of readers: metadata and nodes of a sound trace, by the official runtime."""
    data, at, messages = path.read_bytes(), 0, list[bytes]()
    while at < len(data):
        size = shift = 0
        while True:
            byte = data[at]
            size |= (byte & 127) << shift
            shift, at = shift + 7, at + 1
            if byte < 128:
                break
        messages.append(data[at : at + size])
        at += size
    metadata, *nodes = messages
    return et_def.parse("GlobalMetadata", metadata), [et_def.parse("Node", n) for n in nodes]


def load(folder: Path) -> World:
    """A directory of traces, read by the official runtime."""
    ranks: dict[int, Trace] = {}
    for path in folder.glob("*.et"):
        ranks[int(path.name.split(".")[-2])] = Trace(*read_messages(path))
    groups = folder / "comm_group.json"
    found = json.loads(groups.read_text()) if groups.exists() else None
    return World(dict(sorted(ranks.items())), found)


def generated(folder: Path, **settings: Any) -> Path:
    """Traces of a toy run, with a manifest that says only that they are ours."""
    toy: dict[str, Any] = {"model": "gpt2", "layers": 2, "seq_length": 16, "vocab": 64}
    write(compile(Run(**toy | settings)).program, folder, manifest={})
    return folder


def attribute(node: Any, name: str) -> Any:
    """An attribute of a node."""
    (found,) = (attr for attr in node.attr if attr.name == name)
    return found


def set_to(node: Any, name: str, **value: Any) -> None:
    """Replace an attribute, as in `set_to(node, "comm_size", int64_val=3)`; or add it."""
    drop(node, name)
    added = node.attr.add(name=name)
    for field, content in value.items():
        if field.endswith("_list"):
            getattr(added, field).values.extend(content)
        else:
            setattr(added, field, content)


def drop(node: Any, name: str) -> None:
    """Take an attribute away."""
    kept = [attr for attr in node.attr if attr.name != name]
    del node.attr[:]
    node.attr.extend(kept)


def renumber(world: World, number: Callable[[int], int]) -> None:
    """Give every node another id."""
    for node in world.everywhere():
        node.id = number(node.id)
        for deps in (node.data_deps, node.ctrl_deps):
            deps[:] = [number(dep) for dep in deps]


def simple(ranks: int, groups: dict[str, Any]) -> World:
    """Ranks without nodes; `add` puts some in."""
    header = et_def.message("GlobalMetadata")(version="1.0.0")
    return World({rank: Trace(header, []) for rank in range(ranks)}, groups)


def add(trace: Trace, type_: int, *deps: int, name: str = "", **attributes: Any) -> int:
    """Add a node that needs others; returns its id. Attributes get the types that feeders read."""
    node = et_def.message("Node")(id=len(trace.nodes) + 1, name=name, type=type_, data_deps=deps)
    node.attr.add(name="is_cpu_op", bool_val=False)
    types = {"tensor_size": "uint64_val", "num_ops": "int64_val", "comm_type": "int64_val"}
    types |= {"comm_size": "int64_val", "pg_name": "string_val", "microbatch": "int32_val"}
    for key, value in attributes.items():
        set_to(node, key, **{types.get(key, "int32_val"): value})
    trace.nodes.append(node)
    return node.id


def kernel(trace: Trace, *deps: int, **attributes: Any) -> int:
    """A kernel that takes some time."""
    return add(trace, COMP, *deps, **{"num_ops": 10**9, "tensor_size": 10**6} | attributes)


def collective(trace: Trace, group: int, *deps: int, size: int = 64, **attributes: Any) -> int:
    """An all-reduce."""
    named = {"comm_type": 0, "comm_size": size, "pg_name": str(group)}
    return add(trace, COLL, *deps, **named | attributes)


def send(trace: Trace, to: int, tag: int, *deps: int, size: int = 64, **attributes: Any) -> int:
    """A send."""
    named = {"comm_dst": to, "comm_tag": tag, "comm_size": size}
    return add(trace, SEND, *deps, **named | attributes)


def recv(trace: Trace, source: int, tag: int, *deps: int, size: int = 64, **more: Any) -> int:
    """A receive."""
    named = {"comm_src": source, "comm_tag": tag, "comm_size": size}
    return add(trace, RECV, *deps, **named | more)

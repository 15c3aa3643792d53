"""The recording of a graph that was traced under a process group: what one rank does in a step.

torchtitan's GraphTrainer traces such graphs, and so does `make_fx` over forward, loss and
`torch.autograd.grad`: operations on the rank's own parts of all tensors, and functional
collectives. No process group with devices is needed: PyTorch's fake one stands for any rank.
"""

# torch has partial types: what comes from it is Any here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from typing import Any

from stagewright.errors import UserError
from stagewright.imports.record import dtype_of, number_of, path_of, shape_of, source_of, torch
from stagewright.imports.recording import (
    Process,
    ProcessGroup,
    Recording,
    Ref,
    TracedNode,
)

FUNCTIONAL = "_c10d_functional"


def is_graph_of_rank(of: Any) -> bool:
    """True for an FX graph with collectives."""
    nodes = getattr(getattr(of, "graph", None), "nodes", ())
    return any("c10d" in str(getattr(node, "target", "")) for node in nodes)


def record_graph(graph: Any, mesh: Any = None, *, name: str = "") -> Recording:
    """The recording of an FX graph module whose first output is the loss.

    `mesh` is the DeviceMesh whose dims name the groups, which have to be there still, as they were
    when the graph was traced. Raises UserError for collectives in place (`c10d.allreduce_`), whose
    results other nodes do not name, and for shapes that are not numbers.
    """
    return _GraphRecorder(torch(), graph, mesh).recording(name or "rank")


class _GraphRecorder:
    """One pass over the nodes of a graph."""

    def __init__(self, pt: Any, graph: Any, mesh: Any) -> None:
        self.pt, self.graph = pt, graph
        dims = getattr(mesh, "mesh_dim_names", None) or ()
        self.dims = {str(mesh.get_group(dim).group_name): str(dim) for dim in dims}
        self.groups: dict[str, ProcessGroup] = {}

    def recording(self, name: str) -> Recording:
        nodes = [n for n in map(self._node, self.graph.graph.nodes) if n is not None]
        (returned,) = [n.args[0] for n in self.graph.graph.nodes if n.op == "output"]
        outputs = [n.name for n in self.pt.utils._pytree.tree_leaves(returned) if n is not None]
        rank, world = self.pt.distributed.get_rank(), self.pt.distributed.get_world_size()
        process = Process(rank, world, self.groups)
        return Recording(name, tuple(nodes), tuple(outputs), process=process)

    def _node(self, node: Any) -> TracedNode | None:
        if node.op == "output":
            return None
        value = node.meta.get("val")
        if node.op == "get_attr" and value is None:
            value = getattr(self.graph, node.target)
        is_tensor = isinstance(value, self.pt.Tensor)
        shape = shape_of(value) if is_tensor else ()
        dtype = dtype_of(value) if is_tensor else ""
        if any(isinstance(extent, str) for extent in shape):
            raise UserError(
                f"{node.name} has the shape {list(shape)} in symbols; trace the graph of a rank "
                "with fixed sizes (tracing_mode='fake')"
            )
        if node.op in ("placeholder", "get_attr"):
            kind = "constant" if node.op == "get_attr" else "input"
            if node.op == "placeholder" and is_tensor and value.is_floating_point():
                kind = "param"
            return TracedNode(node.name, kind, shape, dtype, path=str(node.target))
        target = "getitem" if "getitem" in str(node.target) else str(node.target)
        self._check(node, target)
        kwargs = {k: self._argument(v) for k, v in node.kwargs.items() if v is not None}
        args = tuple(self._argument(a) for a in node.args)
        return TracedNode(
            node.name, target, shape, dtype, args, kwargs, path_of(node), source_of(node)
        )

    def _check(self, node: Any, target: str) -> None:
        """Refuse messages and collectives in place, and note the group of a functional one."""
        distributed = target.startswith(("c10d.", FUNCTIONAL))
        if distributed and any(word in target for word in ("send", "recv")):
            where = source_of(node) or path_of(node) or f"node {node.name}"
            raise UserError(
                f"{where}: {target} is a message of a pipeline, whose other stages run graphs that "
                "this one does not show; record a stage without its messages, or give the model "
                "itself a pipeline (--pp)"
            )
        if target.startswith("c10d."):
            where = source_of(node) or path_of(node) or f"node {node.name}"
            raise UserError(
                f"{where}: {target} works in place, so that the graph does not say who reads its "
                "result; trace with functional collectives "
                "(torch.distributed._functional_collectives)"
            )
        if not target.startswith(FUNCTIONAL) or "wait_tensor" in target:
            return
        group = str(node.kwargs.get("group_name", node.args[-1] if node.args else ""))
        if group in self.groups:
            return
        try:
            process_group = self.pt._C._distributed_c10d._resolve_process_group(group)
            ranks = self.pt.distributed.get_process_group_ranks(process_group)
        except Exception:
            raise UserError(
                f"{node.name}: there is no process group {group!r}; import the graph in the "
                "process that traced it, before destroy_process_group"
            ) from None
        description = str(
            getattr(process_group, "group_desc", "")
        )  # init_device_mesh calls it mesh_tp
        dim = description.removeprefix("mesh_") if description.startswith("mesh_") else ""
        self.groups[group] = ProcessGroup(tuple(ranks), self.dims.get(group, dim))

    def _argument(self, value: Any) -> Any:
        if hasattr(value, "op") and hasattr(value, "meta"):
            return Ref(value.name)
        if isinstance(value, list | tuple):
            return tuple(self._argument(each) for each in value)
        if isinstance(value, int | float | str | bool | type(None)):
            return value
        return number_of(value)

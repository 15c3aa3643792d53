"""Names of the sizes that vary, and sizes that nothing but data decides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from stagewright.errors import UserError
from stagewright.imports.calls import OpCall


def refuse_sizes_of_data(calls: Mapping[str, OpCall]) -> None:
    """Refuse values of which data decides the size, such as the rows that a mask selects."""
    for call in calls.values():
        if any(isinstance(n, str) and re.search(r"\bu\d+\b", n) for n in call.shape):
            raise UserError(
                f"{call.source or call.path or call.name}: values of tensors decide how many "
                "elements there are (nonzero, masks, loops over experts); write it with sizes that "
                "shapes decide: sorted rows and torch._grouped_mm, or all experts in one product"
            )


def names_of_symbols(
    calls: Mapping[str, OpCall], dims: Mapping[str, Sequence[str]] | None
) -> dict[str, str]:
    """Names of the symbols of the trace: those given, else B and S in the order of the inputs."""
    inputs = [c for c in calls.values() if c.op == "input"]
    found: dict[str, str] = {}
    for name, given in (dims or {}).items():
        call = next((c for c in inputs if c.name == name), None)
        if call is None or len(given) != len(call.shape):
            known = ", ".join(f"{c.name} of {len(c.shape)}" for c in inputs)
            raise UserError(f"dims: no input {name!r} of {len(given)} dims; there are {known}")
        for extent, word in zip(call.shape, given, strict=True):
            if isinstance(extent, str) and extent.isidentifier():
                found[extent] = word
    free = [word for word in ("B", "S") if word not in found.values()]
    for call in inputs:
        for at, extent in enumerate(call.shape):
            if not isinstance(extent, str) or not extent.isidentifier() or extent in found:
                continue
            if not free:
                known = [found.get(str(n), "?" if isinstance(n, str) else str(n))
                         for n in call.shape]  # fmt: skip
                raise UserError(
                    f"dim {at} of input {call.name} [{', '.join(known)}] varies, besides batch and "
                    f"sequence; name each dim (--dims {call.name}=B,S, in Python "
                    f"dims={{{call.name!r}: ('B', 'S')}}), or keep all sizes of the example "
                    "(--static, static=True)"
                )
            found[extent] = free.pop(0)
    return found


def sizes_of_examples(calls: Mapping[str, OpCall], names: Mapping[str, str]) -> dict[str, int]:
    """The sizes that named dims besides batch and sequence have in the example."""
    inputs = [c for c in calls.values() if c.op == "input" and "example" in c.attrs]
    return {
        names[str(extent)]: int(example)
        for call in inputs
        for extent, example in zip(call.shape, call.attrs["example"], strict=True)
        if names.get(str(extent), "B") not in ("B", "S")
    }

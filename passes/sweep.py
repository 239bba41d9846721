"""One kernel for all members of a class: `collage::sweep`.

Inductor unrolls an optimizer step: it generates and compiles a kernel for each parameter, though
they all do the same. A class is compiled once instead, for tensors of one dimension and any size,
and run over its members, each as one flat walk over its memory.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from collage_fx.passes.program import Rewritten, Slice, graph_of, value_of
from collage_fx.passes.region import register_region
from collage_fx.runtime.loop import Loop, loop_over
from collage_fx.runtime.ops import collage

aten = torch.ops.aten

_SAMPLE = 96
"""A size to trace with; it stands for any."""
MEMBERS = 8
"""Members from which on a class is swept where the user leaves the choice."""
SWEEPS: dict[str, "Sweep"] = {}

_LIBRARY = torch.library.Library("collage", "FRAGMENT")
_LIBRARY.define("sweep(Tensor(a!)[] written, Tensor[] read, str key) -> ()")


@dataclass
class Sweep:
    """What one step does to one member, compiled when it first runs."""

    region: str
    """The key of the lowered graph among the regions."""
    dtypes: list[torch.dtype]
    scalar: list[bool]
    """For each input of the lowered graph."""
    written: list[int]
    """The inputs that are overwritten."""
    results: list[int]
    """For each of them the result that it gets."""
    function: Any = None
    loop: Loop | None = None
    """The same for all members in one call, where the graph is one kernel."""

    @property
    def read(self) -> list[int]:
        """The inputs that are only read."""
        return [i for i in range(len(self.dtypes)) if i not in self.written]

    def compiled(self, device: torch.device) -> Any:
        """Return the function of a list of all inputs, flat."""
        if self.function is None:
            with unset_fake_temporarily(), torch.no_grad():
                self.function = self._compile(device)
        return self.function

    def _compile(self, device: torch.device) -> Any:
        def step(*inputs: Tensor) -> tuple[()]:
            results = collage.region.default(list(inputs), self.region)
            for i, result in zip(self.written, self.results, strict=True):
                inputs[i].copy_(results[result])
            return ()

        samples = [
            torch.zeros(() if scalar else (_SAMPLE,), dtype=dtype, device=device)
            for dtype, scalar in zip(self.dtypes, self.scalar, strict=True)
        ]
        graph = make_fx(step, tracing_mode="symbolic")(*samples)
        fakes = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
        # Without assertions on sizes only the first tensor needs to be flat: it tells the size, of
        # the others the kernel takes the address.
        with inductor_config.patch(size_asserts=False):
            compiled: Any = compile_fx_inner(graph, fakes)
        function = getattr(compiled, "current_callable", None) or compiled
        self.loop = loop_over(function, samples)
        return function


def register_sweep(rewritten: Rewritten) -> str:
    """Return the key under which collage::sweep finds what to do to the members of a class."""
    lowered, part = graph_of(rewritten.lowered), rewritten.members[0]
    placeholders = lowered.graph.find_nodes(op="placeholder")
    written = [at for _, at, _ in part.states]
    results = [part.outputs.index(new) for _, _, new in part.states]
    for k in range(len(rewritten.compensated)):
        written.append(len(part.inputs) + k)
        results.append(len(part.outputs) + k)
    region = register_region(lowered)
    dtypes = [n.meta["dtype"] for n in placeholders]
    scalar = [value_of(n).dim() == 0 for n in part.inputs]
    scalar += [False] * len(rewritten.compensated)
    sweep = Sweep(region, dtypes, scalar, written, results)
    text = repr((region, written, results, scalar))
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    SWEEPS.setdefault(key, sweep)
    return key


def sweepable(rewritten: Rewritten) -> bool:
    """Tell whether the members do nothing but update their states, each in one flat walk."""
    members = rewritten.members
    owned = {m.inputs[at]: m for m in members for _, at, _ in m.states}
    return all(
        _only_updates(m) and _flat(m) and all(owned.get(n, m) is m for n in m.inputs)
        for m in members
    )


def _only_updates(member: Slice) -> bool:
    new = {new for _, _, new in member.states}
    return set(member.outputs) == new and all(
        user.target is aten.copy_.default or user in member.nodes
        for node in member.outputs
        for user in node.users
    )


def _flat(member: Slice) -> bool:
    """Tell whether all tensors of a member lie in memory in one and the same dense order."""
    full = [value_of(n) for n in member.inputs if value_of(n).dim()]
    states = {member.inputs[at] for _, at, _ in member.states}
    if any(not isinstance(s, int) for v in full for s in (*v.shape, *v.stride())):
        return False
    first = full[0] if full else None
    return (
        first is not None
        and all(value_of(n).dim() for n in states)
        and all(v.shape == first.shape and v.stride() == first.stride() for v in full)
        and torch.ops.aten.is_non_overlapping_and_dense(first)
        and all(v.device.type == "cpu" for v in full)
    )


def _run(written: list[Tensor], read: list[Tensor], key: str) -> None:
    sweep = SWEEPS[key]
    function = sweep.compiled(written[0].device)
    first, wide, narrow = sweep.scalar.index(False), len(sweep.written), len(sweep.read)
    place = {i: k for k, i in enumerate([*sweep.written, *sweep.read])}
    members = [
        written[m * wide : (m + 1) * wide] + read[m * narrow : (m + 1) * narrow]
        for m in range(len(written) // wide)
    ]
    members = [tensors for tensors in members if tensors[place[first]].numel()]
    if sweep.loop is not None:
        order = [place[i] for i in sweep.loop.order]
        table = []
        for tensors in members:
            addresses = [t.data_ptr() for t in tensors]
            table += [addresses[i] for i in order]
        sweep.loop.run(table, [tensors[place[first]].numel() for tensors in members])
        return
    for tensors in members:
        inputs = [tensors[place[i]] for i in range(len(place))]
        inputs[first] = inputs[first].as_strided((inputs[first].numel(),), (1,))
        function(inputs)


def _run_meta(written: list[Tensor], read: list[Tensor], key: str) -> None:
    pass


_LIBRARY.impl("sweep", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("sweep", _run_meta, "Meta")

"""Before AOTAutograd: store in a state what a graph returns for the state's place.

A step that puts a new tensor in the place of a state has a graph which takes the old one and
returns the new one: nothing in it says that one becomes the other, so that the new value would be
a high word and no more. Given a copy of the old tensor, the graph may as well overwrite that.
"""

import operator
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from collage_fx.passes.dedup.deduplicate import module_of
from collage_fx.passes.dedup.graph_scan import (
    is_foreach,
    memory_of,
    name_of,
    overloads_of,
    overwrites,
    written_by,
)
from collage_fx.runtime.expansion.eft import LOW_PRECISION
from collage_fx.runtime.trees import tree_leaves

Replaced = dict[int, int]
"""Result of a graph -> the placeholder of the state in whose place it is put, by position."""


def stored_in_place(
    gm: GraphModule, states: Container[int], others: Container[int]
) -> tuple[GraphModule, Replaced]:
    """Return a graph that overwrites states with their successors and returns only the rest.

    The successor of a state is the result that looks like it and is computed of it by the fewest
    operations; of states that are left, results that are computed of none, in their order. Nothing
    in the graph says that it is put there, which the caller may see. Its value is right wherever it
    is put: the caller gives the graph a copy of the state. A result of what may be a state that is
    kept elsewhere takes no place.

    Before::

        mul = m * 0.9
        add = mul + g
        return (add,)

    After::

        mul = m * 0.9
        add = mul + g
        m.copy_(add)
        return ()

    Args:
        gm: a Dynamo graph of a whole step, which stays as it is.
        states: the positions of placeholders that are states.
        others: those of placeholders that are known to be none: parameters and gradients.
    """
    found = _successors(gm, states, others)
    if not found:
        return gm, {}
    graph, env = Graph(), dict[Node, Node]()
    values: Any = graph.graph_copy(gm.graph, env)
    placeholders = gm.graph.find_nodes(op="placeholder")
    for k, j in found.items():
        state = env[placeholders[j]]
        graph.call_method("copy_", (state, values[k])).meta = {
            **values[k].meta,
            "example_value": state.meta["example_value"],
        }
    graph.output(tuple(v for k, v in enumerate(values) if k not in found))
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    return _module_of(gm, graph, env), found


def _successors(gm: GraphModule, states: Container[int], others: Container[int]) -> Replaced:
    inputs = [n for op in ("placeholder", "get_attr") for n in gm.graph.find_nodes(op=op)]
    results: Any = gm.graph.output_node().args[0]
    given, made = _memory(inputs), _memory(results)
    written = _memory([x for n in gm.graph.nodes for x in written_by(n)])
    like = {j: t for j, n in enumerate(inputs) if j not in others for t in _tensors(n)}
    own = {
        j: t
        for j, t in like.items()
        if j in states and t.dtype in LOW_PRECISION and given[memory_of(t)] == 1
        if _is_dense(t)
        if memory_of(t) not in made and memory_of(t) not in written
    }
    new = {
        k: value
        for k, result in enumerate(results)
        for value in _tensors(result)
        if made[memory_of(value)] == 1 and memory_of(value) not in given
    }
    far = _distances(gm.graph, {inputs[j]: {j: 0} for j in like})
    near = {
        k: {j: n for j, n in far[results[k]].items() if _alike(like[j], value)}
        for k, value in new.items()
    }
    ways = [(n, k, j) for k in near if near[k].keys() <= own.keys() for j, n in near[k].items()]
    found: Replaced = {}
    for _, k, j in sorted(ways):
        if k not in found and j not in found.values():
            found[k] = j
    left = [j for j in own if j not in found.values()]
    for k in (k for k in near if not near[k]):
        for j in [j for j in left if _alike(own[j], new[k])][:1]:
            found[k] = j
            left.remove(j)
    return found


def _distances(graph: Graph, begin: dict[Node, dict[int, int]]) -> dict[Any, dict[int, int]]:
    """Return how many operations each node is from states; in lists, each tensor by itself."""
    found: dict[Any, dict[int, int]] = dict(begin)
    each: dict[Any, list[dict[int, int]]] = {}

    def of(operands: Any) -> dict[int, int]:
        nodes = (n for n in tree_leaves(operands) if isinstance(n, Node))
        return _nearest({j: n + 1 for j, n in found[node].items()} for node in nodes)

    for node in graph.nodes:
        if node in begin or node.op == "output":
            continue
        if node.target is operator.getitem and node.args[0] in each:
            found[node] = each[node.args[0]][node.args[1]]
            continue
        found[node] = of((node.args, node.kwargs))
        if is_foreach(node):
            lists = [a for a in node.args if isinstance(a, list | tuple)]
            shared = of([a for a in node.args if a not in lists])
            each[node] = [_nearest([shared, of(row)]) for row in zip(*lists, strict=True)]
        if written := written_by(node):  # who reads it later reads what enters here
            entered = each.get(node, [found[node]] * len(written))
            for a, distances in zip(written, entered, strict=True):
                found[a] = _nearest([found[a], distances])
    return found


def _nearest(distances: Iterable[dict[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for one in distances:
        found |= {j: min(n, found.get(j, n)) for j, n in one.items()}
    return found


def _memory(nodes: Any) -> Counter[int]:
    """Return how many of these nodes have each memory."""
    return Counter(memory_of(t) for n in tree_leaves(nodes) for t in _tensors(n))


def _tensors(node: Any) -> list[Tensor]:
    """Return the tensor that a node stands for; none for what is no strided one."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return [value] if isinstance(value, Tensor) and value.layout is torch.strided else []


def _is_dense(t: Tensor) -> bool:
    """Return True if sizes are known, and each element has memory of its own."""
    known = all(type(n) is int for n in (*t.shape, *t.stride()))
    return known and bool(torch.ops.aten.is_non_overlapping_and_dense(t))


def _alike(state: Tensor, value: Tensor) -> bool:
    # As strings: a symbol that is compared as a number is guarded.
    sizes, others = map(str, (*state.shape, *state.stride())), (*value.shape, *value.stride())
    same = state.dtype is value.dtype and state.device == value.device
    graded = state.requires_grad or value.requires_grad
    return same and not graded and [*sizes] == [*map(str, others)]


def _module_of(gm: GraphModule, graph: Graph, env: dict[Node, Node]) -> GraphModule:
    for node in gm.graph.find_nodes(op="placeholder"):
        env[node]._dynamo_source = getattr(node, "_dynamo_source", None)
    return module_of(gm, graph)


def sets_data(gm: GraphModule) -> None:
    """Have a Dynamo graph do `p.data = x` by `set_`, and not by the operator of torch 2.14.

    Before::

        torch.ops.aten.shallow_copy_data_(p, x)

    After::

        torch.Tensor.set_(p, x)
    """
    operator_ = getattr(torch.ops.aten, "shallow_copy_data_", None)
    nodes = [n for n in gm.graph.nodes if operator_ is not None and n.target is operator_]
    for node in nodes:
        node.target = Tensor.set_
    if nodes:
        gm.recompile()


def written_in_place(gm: GraphModule) -> tuple[GraphModule, list[int | str]]:
    """Return a graph that writes the inputs whose memory it replaces, and where these are.

    `p.data = x` leaves the old memory to who has it: the caller gives each of these inputs new
    memory, with the same value, before the graph runs.

    Before::

        set_ = torch.Tensor.set_(p, x)
        lower = _lower_version_count_by_1(set_)

    After::

        detach = p.detach()
        detach.copy_(x)

    Args:
        gm: a Dynamo graph of a whole step, which stays as it is. One that reads the old memory
            afterwards, or has the new one under another name, is returned as it is.

    Returns:
        the graph, and the position among its arguments, or the name as an attribute, of each.
    """
    sets = _sets(gm)
    if not sets or not _can_be_written(gm.graph, sets):
        return gm, []
    graph, env = Graph(), dict[Node, Node]()
    dropped = {user for n in sets for user in n.users}
    for node in gm.graph.nodes:
        if node in dropped:
            continue
        if node.target is not Tensor.set_:
            env[node] = graph.node_copy(node, env.__getitem__)
            continue
        to, value = (env[n] for n in node.args)
        written = graph.call_method("detach", (to,))
        written.meta = dict(value.meta)
        graph.call_method("copy_", (written, value)).meta = dict(value.meta)
    place: dict[Any, int] = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    moved: Any = dict.fromkeys(n.args[0] for n in sets)
    return _module_of(gm, graph, env), [place.get(n, str(n.target)) for n in moved]


def replaces_memory(gm: GraphModule) -> bool:
    """Return True if a graph gives an input other memory: AOTAutograd mistakes who has the old."""
    return bool(_sets(gm))


def _sets(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.target is Tensor.set_]


def _can_be_written(graph: Graph, sets: list[Node]) -> bool:
    """Return True if writes of inputs' memory are all that replacing it comes to.

    Fake tensors do not tell: some versions of torch have in them what the end of the graph has.
    """
    at = {n: i for i, n in enumerate(graph.nodes)}
    memory: dict[Node, set[Node]] = {}
    """Node -> the nodes that have made the memory that it may have; of an input, that of now."""

    def alone(set_: Node) -> bool:
        """Return True if nothing else has the old memory, or the new one, from then on."""
        args: Any = set_.args
        to, value = args
        either = memory[to] | memory[value]
        same = [n for n, made in memory.items() if n is not to and made & either]
        return not any(n.op in ("placeholder", "get_attr") for n in same) and all(
            at[user] <= at[set_] for n in same for user in n.users
        )

    for node in graph.nodes:
        memory[node] = {node}
        if node in sets:
            if not (_fits(node) and alone(node)):
                return False
            to, value = node.args
            memory[node] = memory[to] = memory[value]
        elif node.op not in ("placeholder", "get_attr", "output") and _may_be_view(node):
            operands = node.all_input_nodes[: 1 if overwrites(node) else None]
            memory[node] = {node}.union(*(memory[n] for n in operands))
    return True


def _fits(set_: Node) -> bool:
    """Return True if a node gives an input another dense tensor of its dtype, and is not read."""
    args: Any = set_.args
    to, value, *others = args
    whole = not others and not set_.kwargs and isinstance(to, Node) and isinstance(value, Node)
    if not whole or to.op not in ("placeholder", "get_attr"):
        return False
    state, new = _tensors(to), _tensors(value)
    fits = state and new and _is_dense(new[0]) and state[0].dtype is new[0].dtype
    return bool(fits) and not any(user.users for user in set_.users)


def _may_be_view(node: Node) -> bool:
    """Return True if an operation may return the memory of its operand."""
    if getattr(operator, name_of(node), None) is node.target:
        return node.target is operator.getitem
    schemas = [o._schema for o in overloads_of(name_of(node))]
    return not schemas or any(r.alias_info is not None for s in schemas for r in s.returns)

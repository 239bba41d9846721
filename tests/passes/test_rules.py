"""Every rule of eft arithmetic on a function of one line: what it becomes, and how exact it is.

For passes.rules.builder, passes.rules.linear, passes.rules.product and passes.rules.join_split.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from graphs import BF16, FP16, capture, operations
from torch import Tensor

from collage_fx.passes.ir.program import Arithmetic, Rewritten
from collage_fx.passes.rules import RULES, rule

aten, prims = torch.ops.aten, torch.ops.prims

Step = Callable[[Tensor, Tensor], object]
U2 = {BF16: 2.0**-16, FP16: 2.0**-22}
SHAPE = (2, 4)
# The second operand's shape; its dtype is that of p, or fp32 where it stands as float64 here.
FULL = torch.ones(SHAPE)
WIDE, SCALAR = FULL.double(), torch.ones((), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """p is the carried state, near one; q another operand, near one."""

    step: Step
    operations: str
    """The collage:: operations of the expanded graph."""
    joined: str = ""
    """The operation that ran as join - op - split."""
    q: Tensor = FULL
    term: float = 0.0
    """The largest term that is rounded to the dtype of p before it is added."""


CASES: dict[object, dict[str, Case]] = {
    aten.add.Tensor: {
        "p + q": Case(lambda p, q: p.add_(q), "grow"),
        "q + p": Case(lambda p, q: p.copy_(q + p), "grow"),
        "p + wide q": Case(lambda p, q: p.add_(q), "grow", q=WIDE, term=1.5),
        "p + 2q": Case(lambda p, q: p.add_(q, alpha=2), "grow"),
        "p + 0.25": Case(lambda p, q: p.add_(0.25), "join split"),
        "p + p": Case(lambda p, q: p.add_(p), "add"),
        "mostly q": Case(lambda p, q: p.lerp_(q, 0.75), "neg grow mul grow"),
    },
    aten.sub.Tensor: {
        "p - q": Case(lambda p, q: p.sub_(q), "grow"),
        "q - p": Case(lambda p, q: p.copy_(q - p), "neg grow"),
        "p - 0.25": Case(lambda p, q: p.sub_(0.25), "join split"),
        "2 - p": Case(lambda p, q: p.copy_(2 - p), "join split"),
    },
    aten.neg.default: {"-p": Case(lambda p, q: p.neg_(), "neg")},
    aten.mul.Tensor: {
        "0.999p": Case(lambda p, q: p.mul_(0.999), "decay grow"),
        "0.999p + q": Case(lambda p, q: p.mul_(0.999).add_(q), "decay grow", term=1.5),
        "0.9p": Case(lambda p, q: p.mul_(0.9), "mul"),
        "0.9p + q": Case(lambda p, q: p.mul_(0.9).add_(q), "mul grow"),
        "p * scalar": Case(lambda p, q: p.mul_(q), "decay split add", q=SCALAR),
        "p * q": Case(lambda p, q: p.mul_(q), "mul"),
        "q * p": Case(lambda p, q: p.copy_(q * p), "mul"),
        "p * wide q": Case(lambda p, q: p.mul_(q), "mul split", q=WIDE),
        "p * p": Case(lambda p, q: p.mul_(p), "mul"),
    },
    aten.div.Tensor: {
        "p / 3": Case(lambda p, q: p.div_(3.0), "div"),
        "p / 0.999": Case(lambda p, q: p.div_(0.999), "decay grow"),
        "p / q": Case(lambda p, q: p.div_(q), "div"),
        "q / p": Case(lambda p, q: p.copy_(q / p), "div"),
        "p / wide q": Case(lambda p, q: p.div_(q), "join split", q=WIDE),
        "p / scalar": Case(lambda p, q: p.div_(q), "join split", q=SCALAR),
    },
    aten.reciprocal.default: {"2 / p": Case(lambda p, q: p.copy_(2 / p), "div mul")},
    aten.sqrt.default: {"sqrt p": Case(lambda p, q: p.sqrt_(), "sqrt")},
    aten.maximum.default: {
        "p or q": Case(lambda p, q: p.copy_(torch.maximum(p + q, q)), "grow join split"),
    },
    aten.minimum.default: {
        "p or q": Case(lambda p, q: p.copy_(torch.minimum(p + q, 2 * q)), "grow join split"),
    },
    aten.where.self: {
        "p or q": Case(lambda p, q: p.copy_(torch.where(q > 1, p + q, q)), "grow"),
        "q or p": Case(lambda p, q: p.copy_(torch.where(q > 1, q, p + q)), "grow"),
    },
    aten.lerp.Scalar: {
        "to q": Case(lambda p, q: p.lerp_(q, 0.125), "mul split add", term=0.2),
        "slowly to q": Case(lambda p, q: p.lerp_(q, 0.001), "decay grow", term=0.002),
        "from q": Case(lambda p, q: p.copy_(q.lerp(p, 0.25)), "mul split add", term=1.2),
    },
    aten.lerp.Tensor: {
        "to q, by q": Case(
            lambda p, q: p.copy_(p.float() + q * (q - p.float())), "decay split add", q=SCALAR
        ),
    },
    prims.convert_element_type.default: {
        "through fp32": Case(lambda p, q: p.copy_(p.float() + q.float()), "grow"),
    },
    aten.clone.default: {
        "a copy": Case(
            lambda p, q: p.copy_(p.clone(memory_format=torch.contiguous_format) + q), "grow"
        ),
    },
}
FLAT = [
    pytest.param(target, case, id=f"{target}: {name}")
    for target, cases in CASES.items()
    for name, case in cases.items()
]


def operands(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """p and its residual, and q."""
    g = torch.Generator().manual_seed(0)
    # Transposed, so that a contiguous clone of it is an operation of its own.
    p = (torch.rand(SHAPE[::-1], generator=g) + 0.5).to(dtype).t()
    lo = (torch.rand(SHAPE, generator=g) * p.float() * torch.finfo(dtype).eps / 4).to(dtype)
    q = torch.rand(case.q.shape, generator=g) + 0.5
    return p, lo, q.to(dtype if case.q.dtype == torch.float32 else torch.float32)


@functools.cache
def rewritten(target: object, case: Case, dtype: torch.dtype) -> Rewritten:
    p, _, q = operands(case, dtype)
    return capture(case.step, p, q).rewritten("all")


def run(r: Rewritten, p: Tensor, lo: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Run the expanded graph: the new state and its residual."""
    assert r.expanded is not None
    names = [n.name for n in r.expanded.graph.find_nodes(op="placeholder")]
    hi, new_lo = r.expanded(*({"p": p, "p_lo": lo}.get(name, q) for name in names))
    return hi, new_lo


def collage_operations(r: Rewritten) -> Iterator[str]:
    for name in operations(r.expanded):
        if name.startswith("collage."):
            yield name.split(".")[1]


def test_every_case_is_of_a_rule() -> None:
    """Every rule has a case in tests/passes/test_rules_exact.py; not all occur in graphs."""
    assert set(CASES) <= set(RULES)


@pytest.mark.parametrize("target, case", FLAT)
@pytest.mark.quick(
    "*.add.*: p + [pq]",
    "*.add.*: mostly q",
    "*.add.*: p + 0.25",
    "*.sub.*: [2q] - p",
    "*.neg.*",
    "*.mul.*: 0.999p + q",
    "*.mul.*: p ? [pq]",
    "*.div.*: p / [3q]",
    "*.div.*: q / p",
    "*.reciprocal.*",
    "*.sqrt.*",
    "*imum.*",
    "*.where.*: p or q",
    "*.lerp.*to q*",
    "prims.*",
    "*.clone.*",
)
def test_rule_expands_to_what_it_says(target: object, case: Case) -> None:
    r = rewritten(target, case, BF16)
    assert target in {n.target for n in r.recurrences[0].carried_path}
    assert sorted(collage_operations(r)) == sorted(case.operations.split())
    assert [name.split(".")[1] for name in r.joined] == case.joined.split()


@pytest.mark.parametrize("target, case", FLAT)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.quick(
    "bf16-*.add.*: p + [pq]",
    "bf16-*.add.*: mostly q",
    "bf16-*.add.*: p + 0.25",
    "bf16-*.sub.*: [2q] - p",
    "bf16-*.neg.*",
    "bf16-*.mul.*: 0.999p + q",
    "bf16-*.mul.*: p ? [pq]",
    "bf16-*.div.*: p / [3q]",
    "bf16-*.div.*: q / p",
    "bf16-*.reciprocal.*",
    "bf16-*.sqrt.*",
    "bf16-*imum.*",
    "bf16-*.where.*: p or q",
    "bf16-*.lerp.*to q*",
    "bf16-*prims.*",
    "bf16-*.clone.*",
)
def test_rule_is_as_exact_as_its_arithmetic(target: object, case: Case, dtype: torch.dtype) -> None:
    p, lo, q = operands(case, dtype)
    hi, new_lo = run(rewritten(target, case, dtype), p, lo, q)
    exact = p.double() + lo.double()
    case.step(exact, q.double())
    error = (hi.double() + new_lo.double() - exact).abs().max()
    bound = 8 * U2[dtype] * 2.25 + torch.finfo(dtype).eps / 2 * case.term
    assert error <= bound, f"{float(error / U2[dtype]):.3g} u^2, allowed {bound / U2[dtype]:.3g}"


def test_an_operation_without_a_rule_is_joined_and_named() -> None:
    case = Case(lambda p, q: p.exp_(), "join split", joined="exp")
    assert aten.exp.default not in RULES
    r = rewritten(aten.exp.default, case, BF16)
    assert sorted(collage_operations(r)) == ["join", "split"]
    assert r.joined == ["aten.exp.default"]
    p, lo, q = operands(case, BF16)
    hi, new_lo = run(r, p, lo, q)
    exact = (p.double() + lo.double()).exp()
    assert ((hi.double() + new_lo.double() - exact) / exact).abs().max() < 2 * U2[BF16]


def test_a_target_is_registered_once() -> None:
    before = dict(RULES)
    with pytest.raises(ValueError, match=r"aten\.add\.Tensor has a rule already: add"):
        rule(aten.add.Tensor)(lambda b, node, x, at: x)
    assert before == RULES


def test_a_sum_of_two_states_keeps_both_low_words() -> None:
    """a is the sum of the last two gradients, exactly, and so is what b gathers of it."""

    def step(a: Tensor, b: Tensor, g: Tensor) -> None:
        a.add_(g)
        b.add_(a)

    tensors = [torch.ones(8, dtype=BF16) for _ in range(3)]
    (r,) = capture(step, *tensors).program("all").rewritten
    assert sorted(collage_operations(r)) == ["add", "grow"]


@pytest.mark.parametrize("factor, start", [(2.0**17, 2.0**-5), (1e-7, 6e4)])
def test_factors_outside_the_range_of_fp16_act_as_in_plain_arithmetic(
    factor: float, start: float
) -> None:
    p = torch.full((8,), start, dtype=FP16)
    r = capture(lambda p: p.mul_(factor), p).rewritten("all")
    hi, lo = run(r, p, torch.zeros_like(p), p)
    assert (hi.double() + lo.double()).tolist() == pytest.approx([start * factor] * 8, rel=1e-3)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_scalar_factor_of_infinity_acts_as_in_plain_arithmetic(factor: float) -> None:
    p, c = torch.full((8,), torch.inf, dtype=BF16), torch.tensor(factor)
    r = capture(lambda p, c: p.mul_(c), p, c).rewritten("all")
    hi, lo = run(r, p, torch.zeros_like(p), c)
    assert torch.equal(hi, p * c) and not lo.any()


@pytest.mark.parametrize("factor", [True, 300, 1e-4, -0.3, 0.5, 0.7, 1.5, -40.0, BF16])
@pytest.mark.parametrize("arithmetic", ["eft", "wide"])
@pytest.mark.quick("*-300", "*-True", "eft-0.0001", "eft-factor8", "wide-0.7")
def test_a_scalar_tensor_is_a_factor_of_all_components(
    factor: float | torch.dtype, arithmetic: Arithmetic
) -> None:
    """The product is right to two words, however small: x + (s - 1)*x has the last bits of x."""
    s = torch.tensor(258.0, dtype=BF16) if factor is BF16 else torch.tensor(factor)
    x = torch.linspace(0.3, 3, 64, dtype=torch.float64)
    p, lo = x.to(BF16), (x - x.to(BF16)).to(BF16)
    r = capture(lambda p, s: p.mul_(s), p, s).rewritten("all", arithmetic)
    found = run(r, p, lo, s)
    exact = (p.double() + lo.double()) * s.double()
    error = (sum(word.double() for word in found) - exact).abs() / exact.abs()
    assert error.max() < 8 * 2.0**-16


@pytest.mark.parametrize("weight", [0.001, torch.tensor(0.001)], ids=["number", "tensor"])
@pytest.mark.quick("tensor")
def test_an_average_over_many_steps_stays_with_float64(weight: float | Tensor) -> None:
    """An exponential average from 1 towards 2; in plain bf16 it stays at 1 for ever."""
    p, lo, q = torch.ones(8, dtype=BF16), torch.zeros(8, dtype=BF16), torch.full((8,), 2.0)
    r = capture(lambda p, q: p.lerp_(q, weight), p, q.to(BF16)).rewritten()
    assert r.expanded is not None
    # A tensor weight w < 1/2 comes as (w >= 1/2, the signed weight): see aten.lerp's decomposition.
    others = {torch.bool: torch.tensor(False), torch.float32: torch.tensor(0.001)}
    for _ in range(1000):
        inputs = []
        for node in r.expanded.graph.find_nodes(op="placeholder"):
            known = {"p": p, "p_lo": lo}.get(node.name, others.get(node.meta["dtype"]))
            inputs.append(q.to(BF16) if known is None else known)
        p, lo = r.expanded(*inputs)
    assert (p.double() + lo.double()).tolist() == pytest.approx([2 - 0.999**1000] * 8, rel=1e-3)

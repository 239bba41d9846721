"""Every configuration that PyTorch tests its own optimizers with, and how to run it."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

import collage_fx

STEPS = 20
SHAPES = ((6, 5), (17,))
INFOS: dict[str, OptimizerInfo] = {info.optim_cls.__name__: info for info in optim_db}
NOT_AFFINE = ("Muon", "Rprop", "Adafactor", "LBFGS")
"""Optimizers whose updates depend on their states otherwise than linearly, or on all elements at
once."""
CAPTURABLE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop", "Rprop")
"""Optimizers that take capturable=True, which on a CPU works in compiled steps only."""


@dataclass(frozen=True)
class Case:
    """One configuration of one optimizer."""

    name: str
    options: int
    """Position among the inputs that PyTorch's tests have for it."""
    impl: str
    """single, foreach, fused or capturable."""

    @property
    def info(self) -> OptimizerInfo:
        return INFOS[self.name]

    @property
    def kwargs(self) -> dict[str, Any]:
        given = copy.deepcopy(self.info.optim_inputs_func(device="cpu")[self.options].kwargs)
        switches = {
            "single": {"foreach": False},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
            "capturable": {"foreach": False, "capturable": True},
            "only": {},
        }
        if self.name == "Adafactor":  # its default is the eps of the parameter's dtype
            given["eps"] = (2**-10, 1e-3)
        if self.name == "LBFGS":
            given |= {"max_iter": 4, "history_size": 5}
        return {**given, **switches[self.impl]}

    @property
    def affine(self) -> bool:
        return self.name not in NOT_AFFINE

    def __str__(self) -> str:
        text = self.info.optim_inputs_func(device="cpu")[self.options].desc
        return f"{self.name}-{self.impl}-{text.replace(' ', '_')}"


def cases() -> Iterator[Case]:
    """Yield every option of every optimizer, in every implementation that has it."""
    for name, info in INFOS.items():
        impls = ["single"] + [i for i in info.supported_impls if i in ("foreach", "fused")]
        if "foreach" not in info.supported_impls:
            impls[0] = "only"
        if name in CAPTURABLE:
            impls.append("capturable")
        for options in range(len(info.optim_inputs_func(device="cpu"))):
            yield from (Case(name, options, impl) for impl in impls)


def start(case: Case, scale: float) -> list[Tensor]:
    """Return bf16 values, in float64: around 0 for scale 0.05, around 1 for scale 1."""
    generator = torch.Generator().manual_seed(1)
    shapes = [s for s in SHAPES if len(s) == 2 or case.name != "Muon"]
    values = [torch.randn(s, generator=generator) for s in shapes]
    return [(0.05 * v if scale == 0.05 else 1 + 0.25 * v).bfloat16().double() for v in values]


def gradients(case: Case, dtype: torch.dtype, scale: float) -> list[list[Tensor]]:
    """Return one list of gradients for each step: values of dtype, in float64."""
    size = 0.1 if case.name in ("SGD", "ASGD", "LBFGS") else 8.0
    generator = torch.Generator().manual_seed(2)
    drift = [torch.randn(v.shape, generator=generator) for v in start(case, scale)]
    return [
        [(size * (d + torch.randn(d.shape, generator=generator))).to(dtype).double() for d in drift]
        for _ in range(STEPS)
    ]


Way = Callable[[Optimizer], Callable[..., Any]]


def plain(optimizer: Optimizer) -> Callable[..., Any]:
    return optimizer.step


def compiled(optimizer: Optimizer) -> Callable[..., Any]:
    return collage_fx.compile(optimizer)


def untraced(optimizer: Optimizer, **options: str) -> Callable[..., Any]:
    """Without Dynamo: every step is recorded."""
    step = collage_fx.compile(optimizer, **options)

    def run(*args: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return step(*args)

    return run


def trained(
    case: Case, dtype: torch.dtype, stream: torch.dtype, scale: float, way: Way = plain
) -> list[Tensor]:
    """Run the steps on gradients that are values of stream; return the parameters in full."""
    params = [v.to(dtype).requires_grad_() for v in start(case, scale)]
    optimizer = case.info.optim_cls(params, **case.kwargs)
    step = way(optimizer)
    for given in gradients(case, stream, scale):
        for p, g in zip(params, given, strict=True):
            p.grad = g.to(dtype)
            if case.name == "SparseAdam":
                p.grad = p.grad.to_sparse()
        model = dtype if dtype is torch.float64 else stream
        down = bool(case.kwargs.get("maximize"))
        step(*([bowl(params, scale, model, down)] if case.info.step_requires_closure else []))
    return [collage_fx.value(p).clone() for p in params]


def bowl(
    params: list[Tensor], scale: float, model: torch.dtype, down: bool
) -> Callable[[], Tensor]:
    """Return a closure for an optimizer that searches: a quadratic function of the parameters.

    It has a smallest value or, upside down, a largest one, for an optimizer that maximizes.
    Gradients are those of a model in the dtype model, whatever the parameters are kept in.
    """

    def closure() -> Tensor:
        losses = []
        for p in params:
            away = p.detach().to(model) - 0.3 * scale
            slope = torch.linspace(0.5, 1.5, p.numel()).to(model).view_as(p) * away
            slope = -slope if down else slope
            p.grad = slope.to(p.dtype)
            losses.append(0.5 * (slope * away).sum())
        return torch.stack(losses).sum()

    return closure


def error(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the 2-norm of the difference."""
    return float(torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)]).norm())


def rounded(values: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [v.to(dtype).double() for v in values]


def check(case: Case, dtype: torch.dtype, scale: float, way: Way) -> tuple[float, float]:
    """Return the error of the full value against float64, and what it must not exceed.

    That is the error of rounding the float64 result; where an optimizer carries a rounding further
    than that, twice the error of training with fp32 states and parameters kept in dtype.
    """
    # A capturable step does not run outside a compiled graph; its reference is the plain one.
    reference = Case(case.name, case.options, "single") if case.impl == "capturable" else case
    exact = trained(reference, torch.float64, dtype, scale)
    found = error(trained(case, dtype, dtype, scale, way), exact)
    if case.affine:
        return found, error(rounded(exact, dtype), exact)
    in_fp32 = trained(reference, torch.float32, dtype, scale)
    return found, 2 * error(rounded(in_fp32, dtype), exact)

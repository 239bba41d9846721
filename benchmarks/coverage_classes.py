"""The optimizers of the coverage table: where they are, how to construct and how to drive them."""

import importlib
import importlib.util
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.optim import Optimizer

SEED = 0
"""Number added to the seeds of parameters and gradients; coverage_seeds.py tries others."""
PACKAGES = {
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch_optimizer",
    "timm.optim": "timm",
    "torch_optimizer": "torch-optimizer",
    "schedulefree": "schedulefree",
    "lion_pytorch": "lion-pytorch",
    "optimi": "torch-optimi",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "adabelief_pytorch": "adabelief-pytorch",
    "galore_torch": "galore-torch",
    "transformers.optimization": "transformers",
    "heavyball": "heavyball",
}
"""Module whose public classes are run -> the name under which it is installed."""

SHAPES = {"matrix": (16, 8), "vector": (8,), "kernel": (4, 3, 3, 3), "scalar": ()}
SUBSETS = (tuple(SHAPES), ("matrix", "vector", "kernel"), ("matrix", "vector"), ("matrix",))
"""Parameters that an optimizer is given: the first of these that it accepts."""

SAME_IN_ALL_DTYPES: dict[str, dict[str, Any]] = {
    "torch.optim.Adafactor": {"eps": (torch.finfo(torch.bfloat16).eps, 1e-3)},
    # Its Kahan summation multiplies the error by alpha, in bf16 only: another algorithm there.
    "optimi.ranger.Ranger": {"kahan_sum": False},
}
"""Arguments whose default depends on the parameter's dtype: without them the runs would differ."""
DRIVES = ("gradients", "closure", "hessian", "sparse")
"""Gradients are set, and for a step that wants them sparse as such; or the step gets a closure; or
a graph of the gradients is kept for Hessians."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def load(module: str) -> types.ModuleType:
    """Import a module of PACKAGES, with Dynamo's limits as they are by default afterwards."""
    if module == "timm.optim":
        # timm/__init__.py imports its models and torchvision, which its optimizers do not need.
        spec = importlib.util.find_spec("timm")
        assert spec is not None and spec.submodule_search_locations is not None
        for name, content in (
            ("timm", {"__path__": list(spec.submodule_search_locations)}),
            ("timm.models", {"group_parameters": None}),
        ):
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(content)
    limit = dynamo_config.recompile_limit
    loaded = importlib.import_module(module)
    dynamo_config.recompile_limit = limit  # timm.optim raises it for the whole process
    return loaded


def class_names(module: str) -> list[str]:
    """Return the names of the module's own optimizer classes, aliases left out."""
    loaded, root = load(module), module.partition(".")[0]
    found: dict[type, str] = {}
    for name in sorted(n for n in dir(loaded) if not n.startswith("_")):
        cls = getattr(loaded, name)
        if not (inspect.isclass(cls) and issubclass(cls, Optimizer)) or cls is Optimizer:
            continue
        if cls.__module__.partition(".")[0] == root:
            found.setdefault(cls, name)
    return sorted(found.values())


class Model(nn.Module):
    """Parameters at scale 1, where an update of a learning rate of 1e-3 is lost in bf16."""

    def __init__(self, names: tuple[str, ...], dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1 + SEED)
        for name, shape in SHAPES.items():
            start = (1 + 0.25 * torch.randn(shape, generator=generator)).bfloat16()
            if name in names:
                self.register_parameter(name, nn.Parameter(start.to(dtype)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        """Return a loss whose gradient is exactly this, and whose Hessian is a tenth."""
        total = torch.zeros((), dtype=next(self.parameters()).dtype)
        for name, p in self.named_parameters():
            total = total + (p * gradients[name]).sum() + 0.05 * (p - p.detach()).square().sum()
        return total


@dataclass(frozen=True)
class Recipe:
    """Arguments to construct a class with, and the way to drive its step."""

    cls: type[Optimizer]
    names: tuple[str, ...]
    arguments: Callable[[nn.Module], Arguments]
    drive: str

    def make(self, model: nn.Module) -> Optimizer:
        """Construct the optimizer, in training mode where it has modes."""
        args, kwargs = self.arguments(model)
        same = SAME_IN_ALL_DTYPES.get(f"{self.cls.__module__}.{self.cls.__qualname__}", {})
        optimizer = self.cls(*args, **{**same, **kwargs})
        if callable(train := getattr(optimizer, "train", None)):
            train()
        return optimizer

    def step(
        self, step: Callable[..., Any], model: nn.Module, gradients: dict[str, Tensor]
    ) -> None:
        """Take one step with these gradients."""

        def closure() -> Tensor:
            model.zero_grad()
            with torch.enable_grad():
                loss: Tensor = model(gradients)
                loss.backward(create_graph=self.drive == "hessian")
            return loss.detach()

        if self.drive == "closure":
            step(closure)
        elif self.drive == "hessian":
            closure()
            step()
        else:
            for name, p in model.named_parameters():
                g = gradients[name]
                p.grad = g.to_sparse() if self.drive == "sparse" else g.clone()
            step()


def recipes(cls: type[Optimizer]) -> Iterator[Recipe]:
    """Yield the ways to run a class, the plainest first."""
    for names, arguments, drive in product(SUBSETS, _arguments(cls), DRIVES):
        yield Recipe(cls, names, arguments, drive)


def _arguments(cls: type[Optimizer]) -> list[Callable[[nn.Module], Arguments]]:
    """Return ways to fill in the required arguments; the rest is left at its default."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    wraps = bool({"optimizer", "base_optimizer"} & set(required))
    keywords = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def filled(base: str) -> Callable[[nn.Module], Arguments]:
        def arguments(model: nn.Module) -> Arguments:
            kwargs = {name: _argument(name, model, base) for name in required}
            if base == "class" and keywords:
                kwargs["lr"] = 1e-3
            return (), kwargs

        return arguments

    if wraps:
        return [filled("instance"), filled("class")]
    if not required:  # (*args, **kwargs)
        return [lambda model: ((list(model.parameters()),), {}), _muon_groups]
    return [filled(""), *([_muon_groups] if required == ["params"] else [])]


def _muon_groups(model: nn.Module) -> Arguments:
    """Return parameter groups that say which of them are orthogonalised: the matrices."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if (p.dim() == 2) == use], "use_muon": use}
        for use in (True, False)
    ]
    return ([g for g in groups if g["params"]],), {}


class _Schedule:
    """A perturbation radius that does not change."""

    lr = max_lr = min_lr = 1e-3

    def step(self) -> float:
        """Return the radius."""
        return 0.05


def _argument(name: str, model: nn.Module, base: str) -> Any:
    params = list(model.parameters())
    if name in ("optimizer", "base_optimizer"):
        return torch.optim.AdamW if base == "class" else torch.optim.AdamW(params, lr=1e-3)
    if name == "specs":
        from heavyball import AdamW

        return [{"params": params, "optimizer": AdamW}]
    known = {"params": params, "model": model, "lr": 1e-3, "num_data": 100, "num_iterations": 24}
    if name == "rho_scheduler":
        return _Schedule()
    if name not in known:
        raise TypeError(f"it needs the argument {name}")
    return known[name]


def gradient_stream(steps: int, nudge: float = 0.0) -> list[dict[str, Tensor]]:
    """Return the recorded gradients: bf16 values in float64, each a drift of its own plus noise.

    With nudge each is off by that relative amount, at random.
    """
    generator = torch.Generator().manual_seed(2 + SEED)
    drift = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
    noise = torch.Generator().manual_seed(3 + SEED)
    stream = []
    for _ in range(steps):
        gradients = {}
        for name, shape in SHAPES.items():
            g = 0.05 * (drift[name] + torch.randn(shape, generator=generator))
            factor = 1 + nudge * torch.randn(shape, generator=noise).double()
            gradients[name] = g.bfloat16().double() * factor
        stream.append(gradients)
    return stream


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the 2-norm of the difference over all parameters."""
    return math.sqrt(sum(float((a[n] - b[n]).square().sum()) for n in a))

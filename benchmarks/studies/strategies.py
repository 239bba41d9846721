"""The ways to keep weights and states that the studies compare, and the optimizers that use them.

masters, twin 1, twin 2   fp32 weights and states, the model has bf16 copies; the twins begin at
                          weights that are off by 1e-6 of themselves, by chance
fp32                      fp32 in all, model and gradients too
bf16, bf16 compiled       bf16 in all; stock torch.compile
kahan                     AdamW with the compensation of optimi: a bf16 buffer takes what adding
                          an update to a weight has lost; eager, and compiled by torch.compile
                          as it is and with all roundings of eager code (`kahan rounded`)
COLLAGE                   optimizers compiled by collage_fx, with these options
PEERS                     optimizers of other packages, where they are installed
"""

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx

sys.path.insert(0, str(Path(__file__).parents[1]))
from steps import Lion
from storages import EIGHT, Adam8

Step = Callable[[], Any]


class MuonAdamW:
    """Muon for the matrices of a transformer's blocks and AdamW for the rest: two optimizers.

    Muon's updates are scaled as AdamW's are, so that one rate is for both. It takes matrices in
    bf16 to make an update, whatever the dtype of its parameters.
    """

    def __init__(self, params: list[Tensor], names: Sequence[str], lr: float, beta2: float) -> None:
        groups: tuple[list[Tensor], list[Tensor]] = ([], [])
        for p, name in zip(params, names, strict=True):
            groups["blocks." in name and p.dim() == 2].append(p)
        self.parts: list[Optimizer] = [
            OPTIMIZERS["AdamW"](groups[0], lr, beta2),
            torch.optim.Muon(groups[1], lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of both."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        """Take a step of each."""
        for part in self.parts:
            part.step()


Stepped = Optimizer | MuonAdamW
Make = Callable[[list[Tensor]], Stepped]


class KahanAdamW(Optimizer):
    """AdamW whose weights have a buffer for what adding to them loses, as optimi's `kahan_sum`."""

    def __init__(self, params: list[Tensor], lr: float, beta2: float) -> None:
        defaults = {"lr": lr, "betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.01}
        super().__init__(params, defaults)

    def _init_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in group["params"]:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros(())
                for name in ("exp_avg", "exp_avg_sq", "compensation"):
                    self.state[p][name] = torch.zeros_like(p)
            params.append(p)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            params: list[Tensor] = []
            self._init_group(group, params)
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in params:
                state, grad = self.state[p], p.grad
                t = state["step"].add_(1)
                m, v, rest = (state[k] for k in ("exp_avg", "exp_avg_sq", "compensation"))
                m.lerp_(grad, 1 - beta1)
                v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                root = (v / (1 - beta2**t).to(v.dtype)).sqrt_().add_(group["eps"])
                rest.sub_(lr * ((m / (1 - beta1**t).to(m.dtype)) / root))
                rest.sub_(lr * group["weight_decay"] * p)
                before = p.clone()
                p.add_(rest)
                rest.sub_(p - before)


OPTIMIZERS: dict[str, Callable[[list[Tensor], float, float], Optimizer]] = {
    # A fused step of fp32 and float64 tensors takes a third of the time.
    "AdamW": lambda params, lr, beta2: torch.optim.AdamW(
        params, lr=lr, betas=(0.9, beta2), fused=params[0].dtype != torch.bfloat16 or None
    ),
    "SGD": lambda params, lr, _: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "Lion": lambda params, lr, _: Lion(params, lr=lr),
    # By itself its first eps is that of the dtype, so that a float64 copy would be another one.
    "Adafactor": lambda params, lr, _: torch.optim.Adafactor(params, lr=lr, eps=(1e-7, 1e-3)),
    **{
        f"AdamW, moments in {name}": lambda params, lr, _, dtype=dtype: Adam8(params, lr, dtype)
        for name, dtype in EIGHT.items()
    },
}
"""Name -> optimizer of parameters, learning rate and beta2 (which only AdamW has a choice of)."""
APART = {"Adafactor", "Muon"}
"""Optimizers of which the update of an element depends on the whole tensor."""
_EXACT = {"param": "remainder16"}
COLLAGE: dict[str, dict[str, Any]] = {
    "light": {"level": "light", "storage": "mcf2", "arithmetic": "eft"},
    "plus": {"level": "plus", "storage": "mcf2", "arithmetic": "eft"},
    "auto": {},
    "auto, eft": {"arithmetic": "eft"},
    "mcf2, wide": {"storage": "mcf2", "arithmetic": "wide"},
    "mcf2, by chance": {"storage": "mcf2", "stochastic_rounding": True},
    "ulp8": {"storage": "ulp8"},
    "ulp8, by chance": {"storage": "ulp8", "stochastic_rounding": True},
    "remainder16": {"storage": "remainder16", "level": "all"},
    "mcf3": {"storage": "mcf3", "arithmetic": "eft"},
    "sr, weights": {"level": "light", "storage": {"param": "sr"}},
    "sr": {"level": "all", "storage": "sr"},
    "ulp4": {"level": "all", "storage": "ulp4"},
    "budget 7.5": {"budget": 7.5},
    "budget 9": {"budget": 9.0},
    "moments in one word": {"level": "light", "storage": {**_EXACT, "*": "mcf2"}},
    "moments in one word, by chance": {"level": "all", "storage": {**_EXACT, "*": "sr"}},
    "moments in two words": {"level": "all", "storage": {**_EXACT, "*": "mcf2"}},
    "moments in three words": {"level": "all", "storage": {**_EXACT, "*": "mcf3"}},
}
"""Name -> options of `collage_fx.compile_`."""
_ADAMW = {"betas": (0.9, 0.999), "weight_decay": 0.01}
PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "torchao, rounding": ("torchao.optim", "_AdamW", {"bf16_stochastic_round": True, **_ADAMW}),
    "optimi, kahan": ("optimi", "AdamW", {"eps": 1e-8, **_ADAMW}),
    "flashoptim": ("flashoptim", "FlashAdamW", _ADAMW),
}
"""Name -> module, class and arguments of an optimizer of another package; AdamW, beta2 of 0.999."""
KAHAN: dict[str, dict[str, Any] | None] = {
    "kahan": None,
    "kahan compiled": {},
    "kahan rounded": {"emulate_precision_casts": True},
}
"""Name -> options of torch.compile; None is eager."""
OTHERS = ("masters", "twin 1", "twin 2", "fp32", "bf16", "bf16 compiled", *KAHAN)
STRATEGIES = (*OTHERS, *COLLAGE, *PEERS)


@dataclass
class Training:
    """Weights that a model computes with, and the steps that change them."""

    weights: list[Tensor]
    step: Callable[[float], None]
    """Function that takes a step at a rate, on the gradients of the weights."""
    values: Callable[[], list[Tensor]]
    """Function that returns what is stored of each weight in all: masters, or with residuals."""
    optimizer: Stepped
    compensated: bool = False
    """True if collage_fx compiled the optimizer."""

    def settings(self) -> dict[str, Any]:
        """Return the options as collage_fx resolves them, and the storages of each kind of state.

        Empty for an optimizer that it did not compile.
        """
        if not self.compensated:
            return {}
        found = [collage_fx.explain(part).to_dict() for part in parts(self.optimizer)]
        states = [state for one in found for state in one["states"]]
        kinds = Counter(f"{s['kind']}: {s['storage'] or 'plain'}" for s in states)
        names = ("level", "arithmetic", "storage", "stochastic_rounding", "budget", "seed")
        about = {name: found[0]["config"][name] for name in names}
        extra = sum(one["residual_bytes"] for one in found)
        return {**about, "states": dict(kinds), "residual_bytes": extra}


def parts(optimizer: Stepped) -> list[Optimizer]:
    """Return the optimizers that one is made of."""
    return optimizer.parts if isinstance(optimizer, MuonAdamW) else [optimizer]


def absent(strategy: str) -> str:
    """Return why a strategy cannot be run here; empty if it can."""
    if strategy not in PEERS:
        return ""
    module = PEERS[strategy][0].partition(".")[0]
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    p = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    p.grad = torch.ones_like(p)
    try:
        _peer(strategy, [p]).step()
    except Exception as error:  # whatever a peer raises is the reason
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return ""


def begin(
    strategy: str, optimizer: str, beta2: float, start: list[Tensor], names: Sequence[str] = ()
) -> Training:
    """Return what trains weights in one way.

    Args:
        strategy: a name in STRATEGIES.
        optimizer: a name in OPTIMIZERS.
        beta2: decay of AdamW's second moment.
        start: fp32 values of the weights. All begin at those rounded to bf16, but for `fp32`.
        names: name of each in the model, which Muon needs.
    """
    make = maker(optimizer, beta2, names)
    if strategy == "fp32":
        weights = [w.clone().requires_grad_() for w in start]
        return _plain(weights, make(weights))
    weights = [w.bfloat16().requires_grad_() for w in start]
    if strategy in ("masters", "twin 1", "twin 2"):
        return _with_masters(strategy, weights, make)
    if strategy in KAHAN:
        return _with_compensation(KAHAN[strategy], weights, KahanAdamW(weights, 1e-3, beta2))
    if strategy in PEERS:
        return _with_peer(strategy, weights)
    made = make(weights)
    if strategy == "bf16":
        return _plain(weights, made)
    if strategy == "bf16 compiled":
        return Training(weights, _at_rate(made, torch.compile(made.step)), lambda: weights, made)
    for part in parts(made):
        collage_fx.compile_(part, **COLLAGE[strategy])
    return Training(
        weights,
        _at_rate(made),
        lambda: [collage_fx.value(w) for w in weights],
        made,
        compensated=True,
    )


def maker(optimizer: str, beta2: float, names: Sequence[str] = ()) -> Make:
    """Return what makes an optimizer of parameters; its rate is set before each step."""
    if optimizer == "Muon":
        return lambda params: MuonAdamW(params, names, 1e-3, beta2)
    return lambda params: OPTIMIZERS[optimizer](params, 1e-3, beta2)


def _at_rate(optimizer: Stepped, step: Step | None = None) -> Callable[[float], None]:
    def take(lr: float) -> None:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao, which is not to be given another one
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        (step or optimizer.step)()

    return take


def _plain(weights: list[Tensor], optimizer: Stepped) -> Training:
    return Training(weights, _at_rate(optimizer), lambda: weights, optimizer)


def _with_masters(strategy: str, weights: list[Tensor], make: Make) -> Training:
    masters = [w.detach().float().requires_grad_() for w in weights]
    if strategy != "masters":
        generator = torch.Generator().manual_seed(int(strategy[-1]))
        with torch.no_grad():
            for m in masters:
                m.mul_(1 + 1e-6 * torch.randn(m.shape, generator=generator).to(m.device))
    optimizer = make(masters)
    take = _at_rate(optimizer)

    @torch.no_grad()
    def step(lr: float) -> None:
        for master, weight in zip(masters, weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        take(lr)
        torch._foreach_copy_([w.detach() for w in weights], [m.detach() for m in masters])

    return Training(weights, step, lambda: masters, optimizer)


def _with_compensation(
    options: dict[str, Any] | None, weights: list[Tensor], optimizer: Optimizer
) -> Training:
    step = None if options is None else torch.compile(optimizer.step, options=options or None)
    return Training(
        weights, _at_rate(optimizer, step), lambda: _summed(optimizer, weights), optimizer
    )


def _summed(optimizer: Optimizer, weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the weights with what their compensation holds, float64."""
    found = []
    for w in weights:
        state = optimizer.state.get(w, {})
        rest = state.get("compensation", state.get("kahan_comp"))
        found.append(w.detach().double() + (0 if rest is None else rest.double()))
    return found


def _peer(strategy: str, weights: list[Tensor]) -> Optimizer:
    module, kind, arguments = PEERS[strategy]
    made: Optimizer = getattr(importlib.import_module(module), kind)(weights, lr=1e-3, **arguments)
    return made


def _with_peer(strategy: str, weights: list[Tensor]) -> Training:
    optimizer = _peer(strategy, weights)
    return Training(weights, _at_rate(optimizer), lambda: _summed(optimizer, weights), optimizer)

"""An optimizer that keeps its moments in fp8, as one has to: PyTorch has no arithmetic there."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Adam8(Optimizer):
    """Adam with moments of a dtype, times constants that bring them into its range."""

    def __init__(
        self,
        params: list[Tensor],
        *,
        lr: float = 1e-4,
        moments: torch.dtype = torch.float8_e4m3fn,
        scales: tuple[float, float] = (64.0, 16.0),
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        defaults = {"lr": lr, "scales": scales, "betas": betas, "moments": moments}
        super().__init__(params, defaults)

    def _init_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Make the states; by this name Dynamo knows that they are the optimizer's."""
        for p in group["params"]:
            if not self.state[p]:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[p][name] = torch.zeros_like(p, dtype=group["moments"])
            params.append(p)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        (first, second), (beta1, beta2) = group["scales"], group["betas"]
        params: list[Tensor] = []
        self._init_group(group, params)
        for p in params:
            state: dict[str, Any] = self.state[p]
            grad = p.grad.float()
            m = beta1 * (state["exp_avg"].float() / first) + (1 - beta1) * grad
            v = beta2 * (state["exp_avg_sq"].float() / second) + (1 - beta2) * grad * grad
            state["exp_avg"].copy_(m * first)
            state["exp_avg_sq"].copy_(v * second)
            p.sub_((group["lr"] * m / (v.sqrt() + 1e-8)).to(p.dtype))

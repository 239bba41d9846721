"""Steps as users write them: of some the code tells that they treat all parameters alike."""

import math
from typing import Any

import torch

EPS = 1e-8
SEEN: list[Any] = []


def alike_momentum(self: Any) -> None:
    for group in self.param_groups:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            m, v = state["m"], state["v"]
            m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            p.addcdiv_(m, v.sqrt().add_(EPS), value=-lr)


def alike_with_closure(self: Any, closure: Any = None) -> Any:
    """As the documentation has it."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in self.param_groups:
        betas = group["betas"]
        for p in group["params"]:
            if p.grad is None:
                continue
            grad = p.grad
            if grad.is_sparse:
                raise RuntimeError("no sparse gradients")
            if group["maximize"]:
                grad = -grad
            state = self.state[p]
            if len(state) == 0:
                state["m"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["m"].lerp_(grad, 1 - betas[0])
            scale = math.sqrt(1 - betas[1] ** 2)
            p.add_(torch.sign(state.get("m")), alpha=-group["lr"] * scale)
    return loss


def alike_under_no_grad(self: Any) -> None:
    with torch.no_grad():
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim > 1 and group["decay"]:
                    p.mul_(0.99)
                p -= group["lr"] * p.grad


def alike_with_means_of_rows(self: Any) -> None:
    """Its states have other sizes than the parameters."""
    for group in self.param_groups:
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state["rows"] = torch.mean(p.grad, -1, keepdim=True)
            state["rows"].lerp_(torch.mean(p.grad, -1, keepdim=True), 0.1)
            p.sub_(group["lr"] * (p.grad - state["rows"]))


def alike_but_for_a_value(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            p.mul_(0.99)
            if p.sum() > 0:
                p.sub_(p.grad)


def unknown_norm_of_all(self: Any) -> None:
    norm = torch.stack([p.grad.norm() for p in self.param_groups[0]["params"]]).norm()
    for group in self.param_groups:
        for p in group["params"]:
            p.sub_(p.grad / norm)


def unknown_sum_carried_on(self: Any) -> None:
    for group in self.param_groups:
        total = 0.0
        for p in group["params"]:
            p.sub_(p.grad + total)
            total = total + p.grad.sum()


def unknown_name_of_the_turn_before(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            if group["lr"] > 1:
                last = p.grad
            p.sub_(last)


def unknown_place(self: Any) -> None:
    for group in self.param_groups:
        for i, p in enumerate(group["params"]):
            p.sub_(p.grad * i)


def unknown_size(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            p.sub_(p.grad / math.sqrt(p.numel()))


def unknown_length(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            p.sub_(p.grad / len(p))


def unknown_shape(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            if p.shape[0] > 3:
                p.sub_(p.grad)


def unknown_value(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            p.sub_(p.grad * self.state[p]["step"].item())


def unknown_list(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            SEEN.append(p)
            p.sub_(p.grad)


def unknown_attribute(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            self.count += 1
            p.sub_(p.grad)


def unknown_number_of_the_group(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            group["count"] += 1
            p.sub_(p.grad)


def unknown_function(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            p.sub_(_of(p))


def _of(p: Any) -> Any:
    return p.grad


def unknown_state_of_another(self: Any) -> None:
    for group in self.param_groups:
        first = group["params"][0]
        for p in group["params"]:
            p.sub_(self.state[first]["m"])


def unknown_other_name_for_the_parameter(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            p = p.grad
            self.state[p]["m"].add_(p)


def unknown_end(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            p.sub_(p.grad)
            break


def unknown_second_loop(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            p.sub_(p.grad)
        for p in group["params"]:
            p.mul_(0.99)


def unknown_other_params(self: Any) -> None:
    for group in self.param_groups:
        for p in group["others"]:
            p.sub_(p.grad)


def unknown_what_torch_is(self: Any) -> None:
    for group in self.param_groups:
        torch = group["library"]
        for p in group["params"]:
            p.sub_(torch.sign(p.grad))


def unknown_object(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            writer = group["writer"]
            p.sub_(p.grad * writer.add(p))


def unknown_local_of_a_global_name(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            if group["lr"] > 1:
                EPS = p.grad
            p.sub_(EPS)


def unknown_member_of_a_list(self: Any) -> None:
    for group in self.param_groups:
        few = group["few"]
        for p in group["params"]:
            if p in few:
                p.sub_(p.grad)


def unknown_first(self: Any) -> None:
    for group in self.param_groups:
        first = group["first"]
        for p in group["params"]:
            if p is not first:
                p.sub_(p.grad)


def unknown_layout(self: Any) -> None:
    for group in self.param_groups:
        for p in group["params"]:
            if p.is_contiguous():
                p.sub_(p.grad)


def unknown_nothing_without_closure(self: Any, closure: Any = None) -> None:
    if closure is None:
        return
    for group in self.param_groups:
        for p in group["params"]:
            p.sub_(p.grad)


def unknown_closure_at_the_end(self: Any, closure: Any = None) -> Any:
    for group in self.param_groups:
        for p in group["params"]:
            p.sub_(p.grad)
    loss = closure()
    return loss

"""Ways to write a running average, and a second moment."""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from programs import Line

BETAS = (0.9, 0.5, 0.99, 0.999, 0.95)

Lines = list[Line]


def one(text: str, each: str = "", carried: bool = False) -> Lines:
    """Return one line, and how it is written for lists of tensors."""
    return [Line(text, each, carried)]


def averages(draw: DrawFn, s: str, x: str, lists: str) -> Lines:
    """A running average of x; lists are those of the states and of x for _foreach_ forms."""
    b = draw(st.sampled_from(BETAS))
    a, (ss, xs) = round(1 - b, 6), lists.split()
    decay, s_ = f"torch._foreach_mul_({ss}, {b})", f'st["{s}"]'
    forms = [
        one(f"{s_}.lerp_({x}, {a})", f"torch._foreach_lerp_({ss}, {xs}, {a})"),
        one(
            f"{s_}.mul_({b}).add_({x}, alpha={a})",
            f"{decay}\ntorch._foreach_add_({ss}, {xs}, alpha={a})",
        ),
        one(f"{s_}.mul_({b}).add_({x})", f"{decay}\ntorch._foreach_add_({ss}, {xs})"),
        one(f"{s_} *= {b}\n{s_} += {a} * {x}"),
        [*one(f"y = {a} * {x}"), *one(f"{s_}.copy_({b} * {s_} + y)", carried=True)],
        one(f"{s_}.add_({x} - {s_}, alpha={a})"),
        one(f"{s_}.sub_({s_}, alpha={a}).add_({x}, alpha={a})"),
        one(f"torch.add({s_} * {b}, {x}, alpha={a}, out={s_})", carried=True),
    ]
    return draw(st.sampled_from(forms))


def squares(draw: DrawFn, s: str, x: str, lists: str) -> Lines:
    """Some average, sum or largest of squares of x."""
    b = draw(st.sampled_from((0.999, 0.99, 0.9, 0.95)))
    a, (ss, xs) = round(1 - b, 6), lists.split()
    s_ = f'st["{s}"]'
    forms = [
        one(
            f"{s_}.mul_({b}).addcmul_({x}, {x}, value={a})",
            f"torch._foreach_mul_({ss}, {b})\ntorch._foreach_addcmul_({ss}, {xs}, {xs}, value={a})",
        ),
        one(f"{s_}.lerp_({x} * {x}, {a})"),
        one(f"{s_}.lerp_({x}.square(), {a})"),
        one(f"{s_}.addcmul_({x}, {x})", f"torch._foreach_addcmul_({ss}, {xs}, {xs}, value=1)"),
        one(f"{s_}.add_({x}.pow(2), alpha=0.1)"),
        one(f"{s_}.copy_(torch.maximum({b} * {s_}, {x} * {x}))", carried=True),
        one(f"{s_}.mul_({b}).add_({x} * {x} * {a})"),
        [*one(f"y = {a} * ({x} * {x})"), *one(f"{s_}.copy_({b} * {s_} + y)", carried=True)],
    ]
    return draw(st.sampled_from(forms))


TORCH_OPTIM = (
    "SGD(GROUPS, momentum=0.9)",
    "SGD(GROUPS, momentum=0.99, nesterov=True, foreach=False)",
    "SGD(GROUPS, momentum=0.9, dampening=0.1)",
    "SGD(GROUPS)",
    "AdamW(GROUPS)",
    "AdamW(GROUPS, betas=(0.9, 0.95), foreach=False)",
    "AdamW(GROUPS, amsgrad=True, eps=EPS)",
    "Adam(GROUPS, eps=EPS)",
    "Adam(GROUPS, betas=(0.5, 0.99), foreach=True)",
    "NAdam(GROUPS, eps=EPS)",
    "RAdam(GROUPS, eps=EPS)",
    "Adamax(GROUPS, eps=EPS)",
    "Adagrad(GROUPS, eps=EPS)",
    "RMSprop(GROUPS, momentum=0.9, eps=EPS)",
    "RMSprop(GROUPS, eps=EPS)",
    "Adadelta(GROUPS, eps=EPS)",
)
"""Optimizers of torch.optim, with what a program puts in the place of GROUPS and EPS."""

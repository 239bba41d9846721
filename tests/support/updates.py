"""Ways to write the update of a parameter, and what a copy of it is for."""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from moments import Lines, one


@st.composite
def apply(draw: DrawFn, u: str, us: str, tensor_lr: bool) -> Lines:
    """The update of p by lr times u, which is a name or a call."""
    forms = [
        one(f"p.sub_(lr * {u})"),
        one(f"p -= lr * {u}"),
        one(f"p.add_({u} * -lr)"),
        one(f"p.copy_(p - lr * {u})", carried=True),
        one(f"z = p - lr * {u}\np.copy_(z)", carried=True),
        one(f"z = p.clone()\nz.sub_(lr * {u})\np.copy_(z)", carried=True),
        one(f"p.copy_(torch.where(g.isfinite(), p - lr * {u}, p))", carried=True),
        one(f"p.lerp_(p - {u}, lr)" if not tensor_lr else f"p.sub_({u} * lr)"),
    ]
    if not tensor_lr:
        forms[:0] = [
            one(f"p.sub_({u}, alpha=lr)", f"torch._foreach_sub_(ps, {us}, alpha=lr)" if us else ""),
            one(
                f"p.add_({u}, alpha=-lr)", f"torch._foreach_add_(ps, {us}, alpha=-lr)" if us else ""
            ),
            one(f"torch._foreach_add_([p], [{u}], alpha=-lr)"),
            one(
                f"torch._foreach_add_([p, p], [{u}, {u}], alpha=-lr / 2)",
                f"torch._foreach_add_([*ps, *ps], [*{us}, *{us}], alpha=-lr / 2)" if us else "",
            ),
        ]
    return draw(st.sampled_from(forms))


def direction(draw: DrawFn, states: dict[str, str], g: str, counter: str) -> tuple[Lines, str, str]:
    """Return the statements that compute the update, its name, and that of the lists of it."""
    eps = "EPS"
    m = draw(st.sampled_from(['st["m"]', g] if "m" in states else [g]))
    ms = {'st["m"]': "ms", "g": "gs"}.get(m, "")
    if "v" not in states:
        forms: list[tuple[Lines, str, str]] = [
            ([], m, ms),
            (one(f"u = {m}.sign()"), "u", ""),
            (one(f"u = {g} + 0.9 * {m}"), "u", ""),
            (one(f"u = {m} / ({m}.norm() + 1e-3)"), "u", ""),
            (one(f"u = {m} * (p.norm() / ({m}.norm() + 1e-3))"), "u", ""),
            (one(f"u = {m}.clamp(-0.1, 0.1)"), "u", ""),
        ]
        if counter:
            forms.append(
                (
                    one(
                        f"u = {m} / (1 - 0.9**k)",
                        f"us = torch._foreach_div({ms}, 1 - 0.9**k)" if ms else "",
                    ),
                    "u",
                    "us",
                )
            )
            forms.append((one(f"u = {m} / k"), "u", ""))
        return draw(st.sampled_from(forms))
    root = f'(st["v"].sqrt() + {eps})'
    listed = f"ds = torch._foreach_sqrt(vs)\ntorch._foreach_add_(ds, {eps})\n"
    listed += f"us = torch._foreach_div({ms}, ds)"
    forms = [
        (one(f"u = {m} / {root}", listed if ms else ""), "u", "us"),
        (one(f'u = {m}.div(st["v"].sqrt().add_({eps}))'), "u", ""),
        (one(f'u = {m} * (st["v"] + {eps}).rsqrt()'), "u", ""),
        (one(f"u = {m} / {root}\nu = u / (u.norm() + 1)"), "u", ""),
        (one(f'd = st["v"].sqrt()\nd += {eps}\nu = {m} / d'), "u", ""),
    ]
    if counter:
        forms += [
            (
                one(f'u = ({m} / (1 - 0.9**k)) / ((st["v"] / (1 - 0.999**k)).sqrt() + {eps})'),
                "u",
                "",
            ),
            (
                one(f'u = {m} / (1 - 0.9**k) / (st["v"].sqrt() / (1 - 0.999**k) ** 0.5 + {eps})'),
                "u",
                "",
            ),
        ]
    return draw(st.sampled_from(forms))


BEGIN_COPIES = (
    "p.detach().clone()",
    "torch.clone(p).detach()",
    "torch.zeros_like(p).copy_(p)",
    "torch.empty_like(p).copy_(p)",
    "p.detach().to(p.dtype, copy=True)",
    "p.new_empty(p.shape).copy_(p)",
)


def weights(draw: DrawFn, counter: str, swaps: bool) -> Lines:
    """Statements about a slow copy of the parameter."""
    a = draw(st.sampled_from((0.1, 0.01, 0.5)))
    s = 'st["slow"]'
    forms = [
        one(f"{s}.lerp_(p, {a})", f"torch._foreach_lerp_(slows, ps, {a})"),
        one(f"{s}.mul_({1 - a}).add_(p, alpha={a})"),
        one(f"{s}.add_(p - {s}, alpha={a})"),
        one(f"{s}.add_((p - {s}) * {a})"),
        [*one(f"y = {a} * p"), *one(f"{s}.copy_({1 - a} * {s} + y)", carried=True)],
        one(f"{s}.lerp_(p, {a})\np.copy_({s})"),
        one(f"{s}.add_(p - {s}, alpha={a})\np.lerp_({s}, 0.5)"),
        [
            *one(f"y = {a} * p"),
            *one(f"x = {1 - a} * {s} + y\n{s}.copy_(x)\np.copy_(x)", carried=True),
        ],
    ]
    if swaps:
        forms.append(one(f"x = p.clone()\np.copy_({s})\n{s}.copy_(x)", carried=True))
    if counter in ("state", "group"):
        forms.append(one(f"if k % 3 == 0:\n    {s}.lerp_(p, {a})\n    p.copy_({s})"))
        forms.append(
            one(f"if k % 2:\n    {s}.lerp_(p, {a})\nelse:\n    p.mul_(0.8).add_({s}, alpha=0.2)")
        )
        forms.append(one(f"if k % 2:\n    {s}.lerp_(p, {a})\nelse:\n    p.lerp_({s}, 0.2)"))
        forms.append(one(f"if k % 3 == 0:\n    {s}.add_(p - {s}, alpha={a})\n    p.copy_({s})"))
    return draw(st.sampled_from(forms))

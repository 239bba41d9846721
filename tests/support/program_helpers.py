"""Helpers of random programs, as a part of their scripts."""

import re

HELPERS = {
    "clip": '''\
@torch.no_grad()
def clip(opt, most, step):
    """Clip gradients by their norm, where their step does not."""
    if not hasattr(step, "_collage"):
        params = [p for group in opt.param_groups for p in group["params"]]
        grads = list({id(p.grad): p.grad for p in params if p.grad is not None}.values())
        total = sum(g.double().square().sum() for g in grads)
        for g in grads:
            g.mul_((most / (total.sqrt() + 1e-6)).clamp(max=1.0))
''',
    "buffer": '''\
BUFFER = {}


def buffer(p):
    """Return memory that is kept from step to step, and written anew in each."""
    return BUFFER.setdefault((p.dtype, p.shape), torch.empty_like(p))
''',
    "Holder": '''\
class Holder:
    """A state that is in no optimizer."""

    def __init__(self, p):
        self.m = torch.zeros_like(p)
''',
    "Slotted": '''\
class Slotted:
    """A state in a slot."""

    __slots__ = ("m",)

    def __init__(self, p):
        self.m = torch.zeros_like(p)
''',
    "Buffered": '''\
class Buffered(torch.nn.Module):
    """A state that is a buffer of a module."""

    def __init__(self, p):
        super().__init__()
        self.register_buffer("m", torch.zeros_like(p))
''',
    "SimpleNamespace": "from types import SimpleNamespace\n",
    "UserDict": "from collections import UserDict\n",
    "partial": "from functools import partial\n",
    "attribute": '''\
def attribute(p):
    """Return a state that is an attribute of its parameter."""
    if not hasattr(p, "m"):
        p.m = torch.zeros_like(p)
    return p.m
''',
    "listed": '''\
LIST = []


def listed(st, p):
    """Return a state that is in a global list."""
    if "place" not in st:
        st["place"] = len(LIST)
        LIST.append(torch.zeros_like(p))
    return LIST[st["place"]]
''',
    "enclosed": '''\
CLOSURES = []


def enclosed(st, p):
    """Return a state that a function encloses."""
    if "place" not in st:
        st["place"], m = len(CLOSURES), torch.zeros_like(p)
        CLOSURES.append(lambda: m)
    return CLOSURES[st["place"]]()
''',
    "shared": '''\
SHARED = {}


def shared(p):
    """Return the one state of all parameters of a shape."""
    return SHARED.setdefault(p.shape, torch.zeros_like(p))
''',
    "GEN": "GEN = torch.Generator()\n",
    "HIGH": '''\
def HIGH(x):
    """Return a value as it is read from outside of the step: its high word."""
    return x
''',
    "laid_out": '''\
def laid_out(x, how):
    """Return a tensor of the same values that is laid out otherwise in memory."""
    if how == "transposed":
        return x.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() else x
    if how == "channels_last":
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    return x.new_zeros(*x.shape, 2)[..., 0].copy_(x)
''',
    "Wrapper": '''\
class Wrapper(torch.optim.Optimizer):
    """Hands on steps, groups and states."""

    def __init__(self, inner):
        self.inner, self.defaults = inner, inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self._patch_step_function()

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def step(self):
        self.inner.step()
''',
    "Named": '''\
class Named(torch.Tensor):
    """A tensor of a class with the `__torch_function__` of all classes."""
''',
    "Boxed": '''\
class Boxed(torch.Tensor):
    """A tensor of a class with a dispatch of its own: results are plain, but for copies."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        given = args, kwargs or {}
        plain, named = torch.utils._pytree.tree_map_only(cls, lambda x: x.inner, given)
        result = func(*plain, **named)
        name = func._schema.name.split("::")[1]
        if name.endswith("_") and isinstance(args[0], cls):
            return args[0]
        if name in ("clone", "detach", "_to_copy", "alias"):
            return cls(result)
        return result

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["inner"])
''',
}


def helpers_of(text: str) -> str:
    """Return those that a text names."""
    return "".join(f"{t}\n\n" for name, t in HELPERS.items() if re.search(rf"\b{name}\b", text))

"""What statements of random programs call, as a part of their scripts."""

from collections.abc import Iterable

HELPERS = '''\
BUFFER = {}


class Holder:
    """A state that is in no optimizer."""

    def __init__(self, p):
        self.m = torch.zeros_like(p)


def buffer(p):
    """Return memory that is kept from step to step, and written anew in each."""
    return BUFFER.setdefault((p.dtype, p.shape), torch.empty_like(p))


'''


def helpers_of(statements: Iterable[str]) -> str:
    """Return what these statements need of it."""
    return HELPERS if any("buffer(" in s or "Holder(" in s for s in statements) else ""

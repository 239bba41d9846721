"""Steps in a process of its own, with settings of the compiler, and what became of them."""

import json
from pathlib import Path
from typing import NamedTuple

from processes import run_script

STEPS = """
import json, os, warnings
os.environ.update({settings!r})
import torch, collage_fx

probed = []
{before}
params = [torch.linspace(1, 2, 64 + i).bfloat16() for i in range({members})]
exact = [p.double() for p in params]
optimizers = [torch.optim.AdamW(some, lr=1e-4) for some in (params, exact)]
step = collage_fx.compile(optimizers[0], multi_tensor={multi_tensor})
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for i in range(5):
        for x in params + exact:
            x.grad = torch.full_like(x, 0.25 + i / 8)
        step(), optimizers[1].step()
errors = [float((collage_fx.value(p) - x).abs().max() / 5e-4) for p, x in zip(params, exact)]
warned = [str(w.message) for w in said if issubclass(w.category, collage_fx.CollageWarning)]
folder, report = os.environ["TORCHINDUCTOR_CACHE_DIR"], str(collage_fx.report(step))
print(json.dumps([max(errors), warned, folder, len(probed), report]))
"""


class Ran(NamedTuple):
    """Result of five steps."""

    error: float
    """The largest, as a share of the way."""
    warned: list[str]
    folder: str
    """Folder of the cache after them."""
    probed: int
    """Number of entries that `before` has added to the list `probed`."""
    report: str


def steps(cache: Path, members: int, before: str = "", **settings: str) -> Ran:
    """Take steps of AdamW in a new process.

    Args:
        cache: the folder of Inductor's cache.
        members: how many parameters there are; Inductor makes the kernels of fewer than 8.
        before: statements that come before the optimizers are made.
        settings: environment variables.
    """
    given = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    # The compiler takes 14 s to prepare headers, which does not pay for a few kernels.
    given |= {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", **settings}
    done = run_script(
        STEPS.format(settings=given, members=members, multi_tensor=members >= 8, before=before)
    )
    assert done.returncode == 0, done.stderr
    return Ran(*json.loads(done.stdout.splitlines()[-1]))

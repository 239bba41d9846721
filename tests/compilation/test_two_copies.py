"""Two versions of collage_fx that share one cache folder: neither runs what the other compiled.

For passes.ir.cache_key and passes.codegen.kernel_cache.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.kernels

STEPS = """
import json, os
import torch, collage_fx
assert collage_fx.__file__.startswith(os.environ["PYTHONPATH"])

class Each(torch.optim.Optimizer):
    def __init__(self, params, update):
        super().__init__(params, {})
        self.update = update

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.update(p)

def add(p):
    p.sub_(p.grad, alpha=2**-10)

def add_mean(p):
    p.sub_(p.mean(), alpha=2**-10)

def scale(p):
    new = p.mul(1 + 2**-9)
    new.sum().item()
    p.copy_(new)

def error(update, members, **options):
    params = [torch.linspace(1, 2, 64 + i).bfloat16() for i in range(members)]
    exact = [p.double() for p in params]
    before = [p.clone() for p in exact]
    both = Each(params, update), Each(exact, update)
    step = collage_fx.compile(both[0], level="all", **options)
    measured = collage_fx.monitor(both[0], every=4) if members > 2 else None
    for _ in range(4):
        for x in params + exact:
            x.grad = torch.full_like(x, 0.25)
        step(), both[1].step()
    if measured is not None:
        found["monitor"] = 1 - measured.latest["kinds"]["parameter"]["lost_plain"]
    moved = [float((x - b).abs().max()) for x, b in zip(exact, before)]
    errors = [float((collage_fx.value(p) - x).abs().max()) for p, x in zip(params, exact)]
    return max(error / way for error, way in zip(errors, moved))

found = {}
found["traced"] = error(add, 2, multi_tensor=False)
found["class"] = error(add, 9)
found["joined"] = error(add_mean, 2)
found["rewritten"] = error(add, 3, record=True, multi_tensor=False)
found["segment"] = error(scale, 2, record=True)
print(json.dumps(found))
"""
LOWERING = "passes/codegen/inductor_lowering.py"
ROUNDS = "ops.to_dtype(value, dtype, src_dtype=source, use_compute_types=False)"
BREAKS = [
    (LOWERING, ROUNDS, ROUNDS.replace("value,", "ops.mul(value, ops.constant(0.5, source)),")),
    ("runtime/kernels/cpp_helpers.py", "(bits<uint32_t>(x) >> 16);", "(bits<uint32_t>(x) >> 17);"),
    ("runtime/kernels/update_sums.py", "(p == zero) ? 1.0", "(p == zero) ? 0.5"),
    ("passes/codegen/rounding_probe.py", "    if _LOST[key]:", "    if not key:"),  # it sees that
]
"""File, text and what stands there in the version whose kernels are wrong. Its graphs are right."""


def copy_of(place: Path, *, broken: bool, keyed: bool) -> str:
    """Lay out a version of collage_fx as it is installed; return the folder to import it from."""
    package = place / "collage_fx"
    shutil.copytree(ROOT / "collage_fx", package, ignore=lambda *_: ("passes", "runtime"))
    for part in ("passes", "runtime"):
        shutil.copytree(ROOT / part, package / part)
    # Without a key the probe of the right version would see what it shares, and interpret steps.
    for name, text, wrong in BREAKS if broken else [] if keyed else BREAKS[-1:]:
        _replace(package / name, text, wrong)
    if not keyed:
        _replace(package / "passes/ir/cache_key.py", "return digest_of(sources())", 'return ""')
    return str(place)


def _replace(path: Path, text: str, other: str) -> None:
    found = path.read_text()
    assert text in found, f"{path.name} has changed"
    path.write_text(found.replace(text, other))


def errors_of(tmp_path: Path, *, keyed: bool) -> list[dict[str, float]]:
    """Return the errors of the wrong version, and then those of the right one on its cache."""
    results = []
    for broken in (True, False):
        site = copy_of(tmp_path / f"site_{broken}", broken=broken, keyed=keyed)
        # Of its own, and not forked: torch imports the collage_fx that is installed.
        settings = {"PYTHONPATH": site, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", STEPS],
            cwd=tmp_path,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


@pytest.mark.slow
def test_versions_have_kernels_of_their_own(tmp_path: Path) -> None:
    wrong, right = errors_of(tmp_path, keyed=True)
    assert len(wrong) == 6 and min(wrong.values()) > 0.1, wrong
    assert max(right.values()) < 0.01, right


@pytest.mark.slow
def test_without_a_key_they_share_them(tmp_path: Path) -> None:
    """The control. A monitor's kernel is kept by its source, which differs in any case."""
    _, right = errors_of(tmp_path, keyed=False)
    shared = {name for name, error in right.items() if error > 0.1}
    assert shared == {"traced", "class", "joined", "rewritten", "segment"}, right

"""Inductor's cache of compiled graphs: it is used, and its key covers all that makes the code.

For passes.codegen.kernel_cache, passes.codegen.inductor_compile and passes.ir.cache_key.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tensors import bf16, with_grads
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache

import collage_fx
from collage_fx import passes, runtime
from collage_fx.passes.codegen import inductor_compile, kernel_cache, multi_tensor_kernel
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS
from collage_fx.passes.codegen.printers.cpp_kernel import Unprintable
from collage_fx.passes.ir import cache_key
from collage_fx.runtime.kernels.cpp_loop import Loop

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    """Begin without kernels on disk, and leave the probe of the compiler out, which has one too.

    Headers that the compiler has prepared, for which it takes 14 s, are those of all tests.
    """
    headers = Path(cache_dir(), "precompiled_headers")
    headers.mkdir(parents=True, exist_ok=True)
    with fresh_cache(), contextlib.ExitStack() as patched:
        Path(cache_dir(), headers.name).symlink_to(headers)
        for module in (inductor_compile, multi_tensor_kernel):
            patched.enter_context(mock.patch.object(module, "check_roundings", lambda *_: None))
        yield


def compiled(members: int = 2, **options: Any) -> tuple[int, int]:
    """Compile a step as a new process would; return hits and misses of the cache.

    The kernels of two members are Inductor's.
    """
    options = {"multi_tensor": members > 2, **options}
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    MULTI_TENSOR_KERNELS.clear()
    params = with_grads([bf16(6 - i % 2) for i in range(members)])
    step = collage_fx.compile(torch.optim.SGD(params, lr=1e-2, momentum=0.5), **options)
    step()  # makes the states, and is recorded
    step()
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


@pytest.mark.slow
def test_the_second_time_comes_from_the_cache() -> None:
    first, again = compiled(), compiled()
    assert first[0] == 0 and first[1] > 0
    assert again == (first[1], 0)


def unprintable(*_: Any, **__: Any) -> None:
    raise Unprintable("for a test")


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.quick("True")
def test_one_kernel_for_many_is_loaded_from_disk(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ours:
        monkeypatch.setattr(multi_tensor_kernel, "print_cpp_kernel", unprintable)
    first = compiled(9)
    source = _only_kernel().sources["cpu"]
    assert first[0] == 0 and (first[1] == 0) is ours and ("cpp_fused" in source) is not ours
    with monkeypatch.context() as patch:
        patch.setattr(multi_tensor_kernel, "compile_for_cpu", None)  # cannot be called
        assert compiled(9) == (0, 0)
    kernel = _only_kernel()
    assert kernel.sources["cpu"] == source
    assert kernel.by_inductor == ("" if ours else "for a test")
    (kept_,) = Path(cache_dir(), "collage_fx").glob("*.json")
    assert isinstance(kernel.runners["cpu"], Loop)
    known = json.loads(kept_.read_text())
    for broken in ("", "[]", "{}", json.dumps(known | {"library": "gone.so"})):
        kept_.write_text(broken)
        assert kernel_cache.load(kept_) is None
    assert compiled(9) == (first[1], 0)  # Inductor has it too


def test_a_kernel_has_a_place_of_its_own_for_each_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = kernel_cache.path_of("a")
    assert place is not None and place == kernel_cache.path_of("a") != kernel_cache.path_of("b")
    with inductor_config.patch({"cpp.max_horizontal_fusion_size": 8}):
        assert kernel_cache.path_of("a") not in (None, place)
    with inductor_config.patch(fx_graph_cache=False):
        assert kernel_cache.path_of("a") is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert kernel_cache.path_of("a") not in (None, place)


def _only_kernel() -> multi_tensor_kernel.MultiTensorKernel:
    (found,) = MULTI_TENSOR_KERNELS.values()
    return found


@pytest.mark.slow
def test_other_passes_are_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_tensor_kernel, "print_cpp_kernel", unprintable)
    compiled()
    # An option that changes nothing in the graph changes nothing in its code.
    assert compiled(on_unsupported="error")[0] > 0
    assert compiled(9)[1] > 0
    for module in (inductor_compile, kernel_cache):
        monkeypatch.setattr(module, "source_digest", lambda: "passes of another version")
    assert compiled()[0] == 0
    hits, misses = compiled(9)
    assert hits == 0 and misses > 0


def test_the_key_covers_every_file_of_the_compiler(tmp_path: Path) -> None:
    tree = [Path(passes.__path__[0]), Path(runtime.__path__[0])]
    files = {path for folder in tree for path in folder.rglob("*.py")}
    assert set(cache_key.sources()) == files and len(files) > 60
    assert {"arithmetic.py", "emit.py", "linear.py"} <= {path.name for path in files}
    copies = [tmp_path / str(i) for i, _ in enumerate(cache_key.sources())]
    for path, copy in zip(cache_key.sources(), copies, strict=True):
        copy.write_bytes(path.read_bytes())
    assert cache_key.digest_of(copies) == cache_key.source_digest()
    for copy in copies[::20]:
        text = copy.read_bytes()
        copy.write_bytes(text + b"#")
        assert cache_key.digest_of(copies) != cache_key.source_digest()
        copy.write_bytes(text)

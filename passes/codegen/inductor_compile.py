"""Where a functional graph becomes machine code: the one call of Inductor's compiler.

All that collage_fx compiles goes through here, so that the key of Inductor's cache covers our
lowerings, and tests can put an interpreter in its place.
"""

from collections.abc import Sequence
from typing import Any

from torch.compiler import config as compiler_config
from torch.fx import GraphModule

from collage_fx.passes.ir.cache_key import source_digest
from collage_fx.runtime import progress
from collage_fx.runtime.kernels import cpp_compiler


def compile_functional(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Return the boxed callable that Inductor makes of a functional graph.

    Args:
        gm: aten and collage:: operations, new values of states copied to placeholders at the end.
        inputs: its (fake) inputs.
        **kwargs: what AOTAutograd hands to `compile_fx_inner` beside them.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    cpp_compiler.quote_cache_dir()
    # A graph of another version may have the same text, and other code.
    tag = compiler_config.cache_key_tag + "collage_fx:" + source_digest()
    with (
        progress.doing(progress.counted("Inductor's graph")),
        compiler_config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
    ):
        return compile_fx_inner(gm, inputs, **kwargs)

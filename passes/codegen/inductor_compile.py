"""Where a functional graph becomes machine code: the one call of Inductor's compiler.

All that collage_fx compiles goes through here, so that tests can put an interpreter in its place.
"""

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from collage_fx.runtime import progress


def compile_functional(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Return the boxed callable that Inductor makes of a functional graph.

    Args:
        gm: aten and collage:: operations, new values of states copied to placeholders at the end.
        inputs: its (fake) inputs.
        **kwargs: what AOTAutograd hands to `compile_fx_inner` beside them.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    with progress.doing(progress.counted("Inductor's graph")):
        return compile_fx_inner(gm, inputs, **kwargs)

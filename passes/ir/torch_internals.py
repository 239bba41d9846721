"""What the passes use of torch's private parts, beside those of Inductor that codegen has.

One place, for the day when a new version of torch moves it.
"""

import torch
from torch._inductor.decomposition import select_decomp_table as select_decomp_table
from torch._ops import OpOverload as OpOverload
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import is_concrete_int as is_concrete_int

set_grad_enabled = torch._C._set_grad_enabled
"""What Dynamo writes into its graphs for torch.no_grad() and torch.enable_grad()."""


def hint_of(number: torch.SymInt | torch.SymFloat) -> float | None:
    """Return its value where the graph is compiled, without a guard; None if it has none."""
    hint: float | None = number.node.hint
    return hint

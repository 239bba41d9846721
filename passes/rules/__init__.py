"""The rules of eft arithmetic: what an operation on a carried path becomes, one family per module.

A rule receives the expansion that comes along the carried path and returns the one that goes on;
other operands are plain, or expansions that `Builder.expansion` gives. Operations without a rule
take `join_split.join_op_split`, and the plan names them. The bounds that rules name are those of
two components; `runtime/expansion/components.py` has those of three, in the same places. What goes
through the wide dtype on its way, such as a decay, is off by 2^-24 of itself more.
"""

if __name__ != "collage_fx.passes.rules":
    raise ImportError(f"this package is collage_fx.passes.rules, not {__name__!r}")

from collage_fx.passes.rules import join_split, linear, product, structural
from collage_fx.passes.rules.builder import RULES, Rule, rule

__all__ = ["RULES", "Rule", "join_split", "linear", "product", "rule", "structural"]

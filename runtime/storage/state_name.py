"""Names of states: a kind, by which code decides, and the text that is shown."""

from dataclasses import dataclass

PARAM = "param"
"""The kind of a parameter itself."""


@dataclass(frozen=True)
class StateName:
    """The name of a state; str() of it is shown: `exp_avg of w`, and `w` of a parameter itself."""

    own: str | None
    """The key that its optimizer has for it, such as `exp_avg`; None of a parameter itself."""
    parameter: str = ""
    """The parameter that it belongs to; empty of a tensor that belongs to none."""

    @property
    def is_param(self) -> bool:
        """True for a parameter itself."""
        return self.own is None

    @property
    def kind(self) -> str:
        """The name that it has in common with those of other parameters: `param`, `exp_avg`."""
        return PARAM if self.own is None else self.own

    @property
    def short(self) -> str:
        """The text without the parameter that it belongs to."""
        return self.parameter if self.own is None else self.own

    def __str__(self) -> str:
        return f"{self.own} of {self.parameter}" if self.own and self.parameter else self.short


class Named:
    """Base of what has the name of a state."""

    state_name: StateName

    @property
    def name(self) -> str:
        """The name as text."""
        return str(self.state_name)

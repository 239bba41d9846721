"""Statistics of what storing an update in 16 bits loses, of one state or of several together.

Source of the lost share and the Effective Descent Quality (EDQ): Collage, arXiv 2405.03637.
"""

import math
import operator
from dataclasses import dataclass, fields


@dataclass(slots=True)
class UpdateStats:
    """Sums over the updates of one state, or of several; the properties are computed from them."""

    count: float = 0.0
    """Elements whose exact update is not zero."""
    lost_plain_count: float = 0.0
    lost_count: float = 0.0
    exact_square: float = 0.0
    dot_plain: float = 0.0
    dot: float = 0.0
    ulps_log2: float = 0.0
    residual_square: float = 0.0
    noise_square: float = 0.0
    infinities: float = 0.0
    """Elements that are infinite or NaN after the step."""

    def __add__(self, other: "UpdateStats") -> "UpdateStats":
        """Return the statistics of both together."""
        return UpdateStats(*map(operator.add, _all_of(self), _all_of(other)))

    @property
    def lost_plain(self) -> float:
        """Share of the updates that 16 bits without a residual would have lost whole."""
        return self.lost_plain_count / self.count if self.count else 0.0

    @property
    def lost(self) -> float:
        """Share of the updates that were lost whole as they are stored."""
        return self.lost_count / self.count if self.count else 0.0

    @property
    def edq_plain(self) -> float:
        """EDQ without a residual, relative to the length of the exact update."""
        return self.dot_plain / self.exact_square if self.exact_square else 0.0

    @property
    def edq(self) -> float:
        """EDQ as stored, <d, d_hat> / ||d||^2 of the exact update d: 1 if nothing is lost."""
        return self.dot / self.exact_square if self.exact_square else 0.0

    @property
    def noise(self) -> float:
        """Length of what storing the updates has added to them, relative to the exact update."""
        return math.sqrt(self.noise_square / self.exact_square) if self.exact_square else 0.0

    @property
    def ulps(self) -> float:
        """Geometric mean of the exact updates, in units of the last place of the high word."""
        return 2.0 ** (self.ulps_log2 / self.count) if self.count else 0.0

    @property
    def residual_norm(self) -> float:
        """Norm of what the residuals hold."""
        return math.sqrt(self.residual_square)

    def to_dict(self) -> dict[str, float]:
        """Return the reported numbers by name."""
        names = ("lost_plain", "lost", "edq_plain", "edq", "noise", "ulps", "residual_norm")
        return {name: float(getattr(self, name)) for name in (*names, "infinities")}


_all_of = operator.attrgetter(*(f.name for f in fields(UpdateStats)))

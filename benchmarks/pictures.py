"""Pictures of the docs, in a light and a dark theme."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[1] / "docs/images"
THEMES = {  # background, text, and a colour for each curve
    "light": ("#ffffff", "#1f2328", ("#cf222e", "#54aeff", "#0550ae", "#1f2328")),
    "dark": ("#0d1117", "#e6edf3", ("#ff7b72", "#1f6feb", "#a5d6ff", "#ffffff")),
}


@contextmanager
def picture(path: Path, theme: str, height: float, size: int) -> Iterator[Any]:
    """Yield the axes of a picture, which is written in the end.

    Args:
        path: of the file.
        theme: a key of THEMES.
        height: in inches; it is 10 wide.
        size: of its letters, in points.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    background, text, _ = THEMES[theme]
    plt.rcParams.update({"font.size": size, "font.family": "DejaVu Sans", "text.color": text})
    plt.rcParams.update({f"{name}.color": text for name in ("xtick", "ytick")})
    figure, axes = plt.subplots(figsize=(10, height), layout="constrained", facecolor=background)
    axes.set_facecolor(background)
    yield axes
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(text)
    figure.savefig(path, dpi=120, facecolor=background)
    plt.close(figure)

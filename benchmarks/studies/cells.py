"""The cells of each study: task, strategy, optimizer, rate and beta2 of every training run."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

BASE = ("masters", "twin 1", "twin 2", "bf16")
"""Strategies that every comparison needs: the one beside it, its floor, and the largest loss."""
CORE = (*BASE, "auto", "plus", "light", "remainder16", "sr", "sr, weights")
ALL = (
    *CORE,
    *("auto, eft", "mcf2, wide", "mcf2, by chance", "ulp8", "ulp8, by chance", "mcf3", "ulp4"),
    *(
        "budget 7.5",
        "budget 9",
        "kahan",
        "kahan compiled",
        "kahan rounded",
        "bf16 compiled",
        "fp32",
    ),
    *("torchao, rounding", "optimi, kahan", "flashoptim"),
)
TUNED = (
    *CORE,
    *("mcf2, wide", "mcf2, by chance", "ulp8", "ulp8, by chance", "mcf3", "ulp4", "kahan"),
)
SIDE = (*BASE, "auto", "plus", "light", "mcf2, wide")
REFERENCES = ("masters", "twin 1", "twin 2", "fp32")
"""Strategies that nothing is said of: they are what others are beside."""
EIGHT_BITS = (
    "moments in one word",
    "moments in one word, by chance",
    "moments in two words",
    "moments in three words",
)


@dataclass(frozen=True)
class Cell:
    """One training run of all seeds of a task."""

    task: str
    strategy: str
    lr: float
    optimizer: str = "AdamW"
    beta2: float = 0.999

    @property
    def name(self) -> str:
        """All of it in one line."""
        return f"{self.task}, {self.optimizer}, {self.strategy}, {self.lr:g}, {self.beta2:g}"

    @property
    def words(self) -> str:
        """The strategy as tables name it."""
        return self.strategy.replace("bf16", "plain bf16").replace(" compiled", ", stock-compiled")

    @property
    def file(self) -> str:
        """Name of the file with its results."""
        return re.sub(r"[^\w.+-]+", "_", self.name) + ".json"

    @property
    def held_out(self) -> bool:
        """True if a claim on EDQ is tested on this cell, by a hash that knows no result."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 1


@dataclass(frozen=True)
class Study:
    """A question, and the cells that answer it, in the order in which they are run."""

    title: str
    cells: tuple[Cell, ...] = ()
    """Runs of a study; those of `edq` and `warning` are of the two studies before them."""


def _cells(
    task: str, strategies: Iterable[str], rates: Iterable[float], optimizer: str = "AdamW"
) -> tuple[Cell, ...]:
    """Return all strategies at a rate, then at the next."""
    return tuple(Cell(task, s, lr, optimizer) for lr, s in product(rates, strategies))


def of_betas(
    task: str, lr: float, betas: Iterable[float], strategies: Iterable[str] | None = None
) -> tuple[Cell, ...]:
    """Return all strategies at a beta2, then at the next; by default those of the study."""
    chosen = tuple(strategies or BETA2)
    return tuple(Cell(task, s, lr, beta2=beta2) for beta2, s in product(betas, chosen))


FINE = (1e-6, 1e-5)
LORA, MUON, DIGITS = (1e-4, 1e-3), (3e-3, 1e-2), (3e-4, 1e-3)
_OTHERS = {"SGD": 0.1, "Lion": 1e-3, "Adafactor": 1e-2}
BETAS = (0.9, 0.95, 0.99, 0.999, 0.9999)
BETA2 = ("masters", "bf16", "light", "plus", "auto")
"""Strategies that are compared at each beta2."""
SWEPT = (("train", 3e-3), ("train 468k", 1e-3), ("tune", 1e-4), ("tune 468k", 1e-4), ("tune", 1e-5))
"""Tasks and rates at which all of BETAS are compared."""
_ELSE = tuple(b for b in BETAS if b != 0.999)
_PARITY = (*_cells("train", ALL, (1e-2, 3e-3)), *_cells("train", ALL, (1e-3,)))
_TUNE = _cells("tune", TUNED, (1e-6, 1e-5, 1e-4))
STUDIES = {
    "parity": Study("Pre-training: does it end where fp32 masters end?", _PARITY),
    "tune": Study("Fine-tuning at low rates: how much of the gain is kept?", _TUNE),
    "beta2": Study(
        "The decay of the second moment",
        (
            *of_betas("train", 3e-3, _ELSE),
            *of_betas("tune", 1e-4, _ELSE),
            *of_betas("train 468k", 1e-3, _ELSE),
            *of_betas("tune 468k", 1e-4, (0.999,), (*BETA2, "twin 1", "twin 2")),
            *of_betas("tune 468k", 1e-4, _ELSE),
            *of_betas("tune", 1e-5, _ELSE),
        ),
    ),
    "edq": Study("EDQ: does it tell the loss?", tuple(dict.fromkeys(_PARITY + _TUNE))),
    "fp8": Study(
        "Moments in fp8",
        tuple(
            Cell("train", s, 3e-3, f"AdamW, moments in fp8 {kind}")
            for kind, s in product(("e4m3fn", "e5m2"), EIGHT_BITS)
        ),
    ),
    "optimizers": Study(
        "Other optimizers",
        tuple(
            Cell("train", s, lr, name)
            for (name, lr), s in product(_OTHERS.items(), (*BASE, "auto", "mcf2, wide"))
        )
        + _cells("muon", (*BASE, "auto", "mcf2, wide"), MUON, "Muon"),
    ),
    "lora": Study("Adapters of rank 8 for frozen weights", _cells("lora", SIDE, LORA)),
    "digits": Study("Handwritten digits", _cells("digits", SIDE, DIGITS)),
    "words": Study("Fine-tuning g2p-en's pretrained model", _cells("words", SIDE, FINE)),
    "jargon": Study("Fine-tuning on the Jargon File", _cells("jargon", SIDE, FINE)),
    "long": Study(
        "Error over 5,000 steps",
        _cells("long", ("masters", "bf16", "auto", "plus", "light", "remainder16", "sr"), (3e-3,)),
    ),
    "warning": Study("The warning about small updates", _TUNE),
    "parity 468k": Study(
        "Pre-training at 463,488 weights",
        _cells("train 468k", (*BASE, "auto", "plus", "light", "remainder16"), (3e-3, 1e-3)),
    ),
    "parity 3M": Study(
        "Pre-training at 3.2 million weights",
        _cells("train 3M", (*BASE, "auto", "plus", "light"), (1e-3,)),
    ),
    "gpu": Study(
        "Pre-training at 25.5 million weights, on a GPU",
        _cells("gpu", (*BASE, "auto", "plus", "light", "remainder16"), (1e-3, 3e-4)),
    ),
    "try": Study(
        "Sizes and rates, before the protocol",
        (
            *_cells("try", ("masters", "bf16"), (1e-3, 3e-3, 1e-2, 3e-2)),
            *_cells("try muon", ("masters", "bf16"), (1e-3, 3e-3, 1e-2), "Muon"),
            *_cells("try lora", ("masters", "bf16"), (1e-5, 1e-4, 1e-3)),
            *_cells("try digits", ("masters", "bf16"), (3e-4, 1e-3, 3e-3)),
            *_cells("try jargon", ("masters", "bf16"), (1e-6, 1e-5)),
            *_cells("try words", ("masters", "bf16"), (1e-6, 1e-5, 1e-4)),
            *of_betas("try tune", 1e-4, (0.9, 0.99, 0.9999), ("masters", "bf16")),
            *of_betas("try tune", 1e-5, (0.9, 0.99, 0.9999), ("masters", "bf16")),
            *of_betas("try tune 468k", 1e-4, (0.9, 0.9999), ("masters", "bf16")),
            *of_betas("try train 468k", 1e-3, (0.9, 0.9999), ("masters", "bf16")),
        ),
    ),
}
BY_NAME = {"gpu", "try"}
"""Studies that are run by their names alone; on a GPU `gpu` is what is run without a name."""
QUICK = {"parity", "tune"}
"""Studies of `--quick`, of which it runs CORE alone."""

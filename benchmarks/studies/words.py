"""Task `words`: another accent for a pretrained model that pronounces English words.

The model is g2p-en's, a GRU that reads letters and one that writes phonemes, 834,890 weights. Its
own answers are taken for the words of Python's standard library, those of 4 to 9 letters that it
gives 3 to 9 phonemes, and changed to an accent without R, as in most of England: R is silent but
before a vowel, and ER without stress is AH. A tenth of the words is held out.
"""

import re
from collections.abc import Iterator
from functools import cache

import byte_model
import data
import numpy
import torch
import torch.nn.functional as F
from models import Batch, Named
from torch import Tensor

LETTERS = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
_SOUNDS = "AA AE AH AO AW AY,B CH D DH,EH ER EY,F G HH,IH IY,JH K L M N NG,OW OY,P R S SH T TH,UH"
PHONEMES = [
    *("<pad>", "<unk>", "<s>", "</s>"),
    *(
        p + s
        for i, group in enumerate(_SOUNDS.split(","))
        for p in group.split()
        for s in (("0", "1", "2") if i % 2 == 0 else ("",))
    ),
    *("UW", "UW0", "UW1", "UW2", "V", "W", "Y", "Z", "ZH"),
]
"""Names of the model's answers, in its order (g2p_en/g2p.py)."""
PAD, BEGIN, END = 0, 2, 3
MOST, BATCH, HELD_OUT_EVERY, HELD_OUT = 9, 32, 10, 512


def weights() -> Named:
    """Return the weights of the pretrained model, in fp32."""
    with numpy.load(data.path("words")) as found:
        return {name: torch.from_numpy(found[name]) for name in found.files}


def _cell(weights: Named, part: str) -> tuple[Tensor, ...]:
    return tuple(weights[f"{part}_{name}"].float() for name in ("w_ih", "w_hh", "b_ih", "b_hh"))


def _step(x: Tensor, h: Tensor, cell: tuple[Tensor, ...]) -> Tensor:
    """Return the next state of a GRU, with sums in fp32."""
    w_ih, w_hh, b_ih, b_hh = cell
    given, kept = F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh)
    (r1, z1, n1), (r2, z2, n2) = given.chunk(3, -1), kept.chunk(3, -1)
    z, n = torch.sigmoid(z1 + z2), torch.tanh(n1 + torch.sigmoid(r1 + r2) * n2)
    return (1 - z) * n + z * h


def encoded(weights: Named, letters: Tensor) -> Tensor:
    """Return the states after words, int64 (batch, letters + 1), which end with </s> and pads."""
    kind, cell = weights["enc_emb"].dtype, _cell(weights, "enc")
    x = F.embedding(letters, weights["enc_emb"]).float()
    h = torch.zeros_like(x[:, 0])
    for t in range(letters.shape[1]):
        new = _step(x[:, t], h, cell).to(kind).float()
        h = torch.where(letters[:, t, None] == PAD, h, new)
    return h


def loss(weights: Named, letters: Tensor, phonemes: Tensor) -> Tensor:
    """Return the mean cross-entropy (nats a phoneme) of answers that end with </s> and pads."""
    kind, cell = weights["dec_emb"].dtype, _cell(weights, "dec")
    h, states = encoded(weights, letters), []
    given = F.pad(phonemes[:, :-1], (1, 0), value=BEGIN)
    x = F.embedding(given, weights["dec_emb"]).float()
    for t in range(given.shape[1]):
        h = _step(x[:, t], h, cell).to(kind).float()
        states.append(h)
    logits = F.linear(torch.stack(states, 1), weights["fc_w"].float(), weights["fc_b"].float())
    return F.cross_entropy(logits.flatten(0, 1), phonemes.flatten(), ignore_index=PAD)


@torch.no_grad()
def answers(weights: Named, letters: Tensor, most: int) -> Tensor:
    """Return the likeliest phoneme at each place, int64 (batch, most)."""
    h, x, cell, found = encoded(weights, letters), None, _cell(weights, "dec"), []
    x = weights["dec_emb"][BEGIN].expand(len(letters), -1)
    for _ in range(most):
        h = _step(x, h, cell)
        best = F.linear(h, weights["fc_w"], weights["fc_b"]).argmax(-1)
        found.append(best)
        x = weights["dec_emb"][best]
    return torch.stack(found, 1)


def without_r(phonemes: list[str]) -> list[str]:
    """Return an answer in the accent without R."""
    after = [*phonemes[1:], ""]
    kept = [p for p, then in zip(phonemes, after, strict=True) if p != "R" or then[-1:].isdigit()]
    return ["AH0" if p == "ER0" else p for p in kept]


@cache
def _read() -> tuple[Tensor, Tensor]:
    """Return words and answers, with pads (count, MOST + 1), in alphabetic order."""
    text = bytes(torch.cat(byte_model.read_text()).numpy()).decode(errors="ignore")
    names = sorted(set(re.findall(rf"(?<![A-Za-z_])[a-z]{{4,{MOST}}}(?![A-Za-z_])", text)))
    letters = torch.tensor(
        [[*map(LETTERS.index, n), LETTERS.index("</s>"), *[PAD] * (MOST - len(n))] for n in names]
    )
    rows, chosen = [], []
    for i, row in enumerate(answers(weights(), letters, MOST + 1).tolist()):
        said = row[: row.index(END)] if END in row else []
        if len(said) >= 3 and all(p > END for p in said):
            new = [PHONEMES.index(p) for p in without_r([PHONEMES[p] for p in said])]
            rows.append([*new, END, *[PAD] * (MOST - len(new))])
            chosen.append(i)
    return letters[chosen], torch.tensor(rows)


def batches(seed: int) -> Iterator[Batch]:
    """Yield random words and their answers, without end."""
    words, said = _read()
    ours = torch.arange(len(words)) % HELD_OUT_EVERY != 0
    words, said = words[ours], said[ours]
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(words), (BATCH,), generator=generator)
        yield words[rows], said[rows]


def held_out() -> list[Batch]:
    """Return words that are held out, in one batch."""
    words, said = _read()
    return [(words[::HELD_OUT_EVERY][:HELD_OUT], said[::HELD_OUT_EVERY][:HELD_OUT])]

"""Send what a step has changed of a bf16 model to a second process, as RL sends it to a sampler.

At a rate of 1e-6 few weights change in a step: their places and values are some percent of the
bytes of all weights. The second process puts them into a copy of its own, which has the same bits.
"""

import copy
import hashlib
import io
from multiprocessing.connection import Connection

import torch
from quickstart import loss_of, pretrained
from torch import nn
from torch.multiprocessing import Pipe, get_context
from torch.optim import AdamW

import collage_fx

STEPS = 50


def digest(model: nn.Module) -> str:
    """Return a digest of the bits of all weights."""
    bits = b"".join(p.detach().view(torch.int16).numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(bits).hexdigest()


def sample(model: nn.Module, pipe: Connection) -> None:
    """Put changes into a model for as long as some come, and answer with the digest of its bits."""
    parameters = dict(model.named_parameters())
    while received := pipe.recv_bytes():
        with torch.no_grad():
            for name, (places, values) in torch.load(io.BytesIO(received)).items():
                parameters[name].view(-1)[places.long()] = values
        pipe.send(digest(model))


def packed(model: nn.Module) -> bytes:
    """Return the changes of a model as bytes, places in four bytes each."""
    changes = collage_fx.take_changes(model)
    buffer = io.BytesIO()
    torch.save({name: (places.int(), values) for name, (places, values) in changes.items()}, buffer)
    return buffer.getvalue()


def main() -> None:
    """Train here, and compare the bits that the other process has after each step."""
    model = pretrained().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-6)
    collage_fx.compile_(optimizer, changed=True)
    ours, theirs = Pipe()
    sampler = get_context("spawn").Process(target=sample, args=(copy.deepcopy(model), theirs))
    sampler.start()
    sent = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rows=64, seed=step).backward()
        optimizer.step()
        sent.append(packed(model))
        ours.send_bytes(sent[-1])
        assert ours.recv() == digest(model), "the copy has other bits"
    ours.send_bytes(b"")
    sampler.join()
    whole, mean = 2 * sum(p.numel() for p in model.parameters()), sum(map(len, sent)) / STEPS
    print(f"{STEPS} steps: after each the copy in the other process has the same bits")
    print(f"{mean:,.0f} bytes a step in place of {whole:,}: {1 - mean / whole:.1%} fewer")


if __name__ == "__main__":
    main()

"""torchtitan's optimizer container, its optimizers compiled; a resumed run has the same bits.

Its own way to load leaves residuals out, with a warning. PyTorch's, of the same keys, does not.
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as state_dicts
from torchtitan.components.optimizer import OptimizersContainer, default_adamw

import collage_fx

FLAT = state_dicts.StateDictOptions(flatten_optimizer_state_dict=True)


class Compensated(OptimizersContainer):
    """The container, of one optimizer for each model part."""

    def __init__(self, config, *, model_parts):
        super().__init__(config, model_parts=model_parts)
        for optimizer in self.optimizers:
            collage_fx.compile_(optimizer)

    def state_dict(self):
        """Return the states of all optimizers, and their residuals, by name of the parameter."""
        pairs = zip(self.model_parts, self.optimizers, strict=True)
        found = (state_dicts.get_optimizer_state_dict(*pair, options=FLAT) for pair in pairs)
        return {name: value for states in found for name, value in states.items()}

    def load_state_dict(self, states):
        """Give each optimizer what is its own of these."""
        for pair in zip(self.model_parts, self.optimizers, strict=True):
            state_dicts.set_optimizer_state_dict(*pair, states, options=FLAT)


if __name__ == "__main__":
    runs, folder = [], tempfile.mkdtemp()
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).bfloat16()
        parts = [torch.nn.ModuleDict({name: layer}) for name, layer in model.named_children()]
        runs.append((model, Compensated(default_adamw(1e-4, fused=False), model_parts=parts)))
    run, again = ({"model": model.state_dict(), "optimizer": o} for model, o in runs)
    for half in range(2):
        for model, optimizers in runs[: half + 1]:
            for data in torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(half)):
                optimizers.zero_grad()
                model(data.bfloat16()).square().mean().backward()
                optimizers.step()
        if half == 0:
            dcp.save(run, checkpoint_id=folder)
            dcp.load(again, checkpoint_id=folder)
    values = ([collage_fx.value(p) for p in model.parameters()] for model, _ in runs)
    assert all(map(torch.equal, *values))
    print("the resumed run has the same bits")

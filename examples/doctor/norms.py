"""Of a bf16 model only the norms are trained."""

import torch
from model import Model, batch, loss_of

model = Model().bfloat16()
norms = [p for name, p in model.named_parameters() if "norm" in name]
optimizer = torch.optim.AdamW(norms, lr=1e-3)
for _ in range(50):
    optimizer.zero_grad()
    loss = loss_of(model, batch())
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")

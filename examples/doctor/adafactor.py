"""Adafactor on bf16 weights, whose averages of squares are sums over rows and columns."""

import torch
from model import Model, batch, loss_of

model = Model().bfloat16()
optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
for _ in range(50):
    optimizer.zero_grad()
    loss = loss_of(model, batch())
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")

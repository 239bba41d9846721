"""A fine-tune of bf16 weights at a rate of 1e-5."""

import torch
from model import Model, batch, loss_of

model = Model().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(50):
    optimizer.zero_grad()
    loss = loss_of(model, batch())
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")

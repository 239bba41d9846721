"""fp32 weights under autocast: only matrices are multiplied in bf16."""

import torch
from model import Model, batch, loss_of

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(50):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, batch())
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")

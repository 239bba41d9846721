"""SGD with momentum on bf16 weights, with a cosine schedule."""

import torch
from model import Model, batch, loss_of

model = Model().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
for _ in range(100):
    optimizer.zero_grad()
    loss = loss_of(model, batch())
    loss.backward()
    optimizer.step()
    schedule.step()
print(f"loss {loss.item():.3f}")

"""Reinforcement learning of bf16 weights at a rate of 1e-6: bytes that are letters are rewarded."""

import torch
from model import Model, batch

model = Model().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95))
for _ in range(50):
    chosen = torch.distributions.Categorical(logits=model(batch()[:, :-1])[:, -1].float())
    actions = chosen.sample()
    rewards = ((actions >= ord("a")) & (actions <= ord("z"))).float()
    loss = -(chosen.log_prob(actions) * (rewards - rewards.mean())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"reward {rewards.mean().item():.3f}")

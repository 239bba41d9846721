"""LoRA on a bf16 model: the adapters are in bf16 too."""

import torch
from model import LENGTH, TEXT
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": LENGTH}
config = LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
model = get_peft_model(GPT2LMHeadModel(GPT2Config(**sizes)), config).to(torch.bfloat16)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
rows = TEXT[: 320 * LENGTH].view(-1, 8, LENGTH)
for step in range(40):
    optimizer.zero_grad()
    loss = model(input_ids=rows[step], labels=rows[step]).loss
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")

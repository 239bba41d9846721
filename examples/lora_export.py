"""LoRA by PEFT in bf16: adapters with compensated steps, and an export of what they are in fp32.

At the rates of fine-tuning plain bf16 adapters hardly move. The base model is frozen and costs no
residual. The export has the whole values, which files in bf16 would round.
"""

import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

import collage_fx

STEPS, RATE = 30, 1e-5


def tuned(steps: int, compensated: bool = False) -> dict[str, torch.Tensor]:
    """Fine-tune adapters of a small GPT-2 with random weights; return their values in fp32."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    base = GPT2LMHeadModel(GPT2Config(**sizes, **quiet, loss_type="ForCausalLM")).bfloat16()
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model = get_peft_model(base, lora, autocast_adapter_dtype=False)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=RATE, weight_decay=0.0)
    if compensated:
        collage_fx.compile_(optimizer)
    rows = torch.stack([(torch.arange(16) + begin) % 64 for begin in range(16)])
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    values = collage_fx.master_state_dict(model, optimizer)
    return {name: t.contiguous() for name, t in values.items() if "lora_" in name}


def main(file: Path) -> None:
    """Train both ways, export the compensated adapters, and say how far both have moved."""
    save_file(tuned(STEPS, compensated=True), file)
    start, exported = tuned(0), load_file(file)
    for way, values in (("compensated", exported), ("plain bf16", tuned(STEPS))):
        moved = torch.cat([(t - start[name]).abs().flatten() for name, t in values.items()])
        print(f"{way}: {len(values)} adapters moved by {moved.mean() / RATE:.1f} rates on average")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(), "adapters.safetensors"))

"""Hugging Face's Trainer on a model that was loaded in the dtype of its checkpoint, bf16."""

import tempfile

from model import LENGTH, TEXT
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": LENGTH}

with tempfile.TemporaryDirectory() as folder:
    GPT2LMHeadModel(GPT2Config(**SIZES)).bfloat16().save_pretrained(folder)  # what was published
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = [{"input_ids": row, "labels": row} for row in TEXT[: 320 * LENGTH].view(-1, LENGTH)]
    arguments = TrainingArguments(
        folder, max_steps=40, learning_rate=5e-5, report_to=[], use_cpu=True, disable_tqdm=True
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()

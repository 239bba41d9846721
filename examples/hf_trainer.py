"""Hugging Face's Trainer with compensated steps: one callback, and a run resumed.

A small GPT-2 with random weights learns to count, in bf16, with Trainer's own default optimizer
(fused AdamW). A second Trainer goes on from the checkpoint in the middle: the same bits.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import collage_fx

STEPS = 20


def trainer(folder: str) -> Trainer:
    """Return a Trainer as it comes, with the callback."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, loss_type="ForCausalLM")).bfloat16()
    rows = [(torch.arange(16) + begin) % 64 for begin in range(64)]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        save_steps=STEPS // 2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    compiles = collage_fx.compile_callback()
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=[compiles])


def main() -> None:
    """Train, resume in the middle, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        whole, resumed = trainer(folder), trainer(folder)
        whole.train()
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    states = collage_fx.report(whole.optimizer).states
    print(f"{sum(s.compensated for s in states)} of {len(states)} states compensated")
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(collage_fx.value(p), collage_fx.value(q))
    print("the resumed run has the same bits")


if __name__ == "__main__":
    main()

"""TRL's SFTTrainer with LoRA by PEFT, in bf16; a run resumed in the middle has the same bits."""

import tempfile
from functools import partial

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import collage_fx

STEPS = 20


class Compensated(TrainerCallback):
    """Has the trainer's optimizer take compensated steps."""

    def on_train_begin(self, *args, optimizer, **kwargs):
        """Come after a checkpoint has been loaded."""
        collage_fx.compile_(optimizer)


def trainer(folder: str, callback: TrainerCallback) -> SFTTrainer:
    """Return an SFTTrainer as it comes, whose data are tokens already."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    words = Tokenizer(WordLevel({str(token): token for token in range(64)}, unk_token="0"))
    rows = [{"input_ids": [(begin + k) % 64 for k in range(16)]} for begin in range(64)]
    base = GPT2LMHeadModel(GPT2Config(**sizes, loss_type="ForCausalLM")).bfloat16()
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model = get_peft_model(base, lora, autocast_adapter_dtype=False)  # by itself PEFT takes fp32,
    model.load_adapter = partial(model.load_adapter, autocast_adapter_dtype=False)  # here too
    return SFTTrainer(
        model,
        SFTConfig(folder, max_steps=STEPS, save_steps=STEPS // 2, use_cpu=True),
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0"),
        callbacks=[callback],
    )


def main() -> None:
    """Train, resume in the middle, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        whole, resumed = trainer(folder, Compensated()), trainer(folder, Compensated())
        whole.train()
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    states = collage_fx.report(whole.optimizer).states
    print(f"{sum(s.compensated for s in states)} of {len(states)} states compensated")
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(collage_fx.value(p), collage_fx.value(q))
    print("the resumed run has the same bits")


if __name__ == "__main__":
    main()

"""Fine-tune a patched model with TRL's SFTTrainer and LoRA; the adapter's folder records the method.

python examples/finetune_with_sft_trainer.py [FOLDER]

It needs `pip install trl peft`. The settings are for the bundled model and some seconds; the comments have values to
start with for a model of billions of parameters.
"""

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import rope_ext_hf as rope
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reference import path

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
name, length = path(), 1024  # for your model: its Hub id or folder, and the length to train for, such as 32768

tokenizer = AutoTokenizer.from_pretrained(name)
texts = Dataset.from_list([{"text": document.text[: 4 * length]} for document in load("stdlib")])

model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)  # torch.bfloat16
model = rope.patch(model, "yarn", target_length=length)  # before SFTTrainer puts the adapter on
settings = SFTConfig(
    output_dir=folder / "run",
    max_length=length,  # the extended length; the trainer cuts longer texts
    packing=False,  # packed short texts never reach the new positions, so train on texts that are long themselves
    max_steps=3,  # some hundreds
    per_device_train_batch_size=1,
    gradient_accumulation_steps=1,  # 16
    learning_rate=1e-3,  # 1e-4, or without LoRA 2e-5, as in finetune_with_trainer.py
    lr_scheduler_type="cosine",
    warmup_steps=1,  # 20
    bf16=torch.cuda.is_available(),
    gradient_checkpointing=False,  # True: slower, with less memory for activations
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
adapter = LoraConfig(
    r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
)
trainer = SFTTrainer(model=model, args=settings, train_dataset=texts, processing_class=tokenizer, peft_config=adapter)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

trainer.save_model(str(folder / "adapter"))
again = rope.from_pretrained(folder / "adapter", dtype=model.dtype)  # the base model with the method and the adapter
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the adapter's folder says: {rope.describe(again).method}")
assert rope.describe(again).extended_length == length

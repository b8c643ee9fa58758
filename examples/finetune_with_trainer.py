"""Train a patched model at a longer length with transformers' Trainer, save it, and load it with stock transformers.

python examples/finetune_with_trainer.py [FOLDER]

The settings are for the bundled model and some seconds. The comments have those of the YaRN paper (arXiv 2309.00071,
sec. 4.1) for Llama 2 with 7 and 13 billion parameters.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import rope_ext_hf as rope
from rope_ext_hf.hub import leading_tokens
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reference import path

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
name, length = path(), 1024  # for your model: its Hub id or folder, and the length to train for, such as 65536

# Rows have exactly the extended length, since a model learns the new positions only from rows that reach them.
tokenizer = AutoTokenizer.from_pretrained(name)
text = "\n\n".join(document.text for document in load("stdlib"))  # or load("books/*.txt"), load("hf:OWNER/NAME")
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
prefix = torch.tensor(leading_tokens(tokenizer), dtype=ids.dtype)  # BOS, if the tokenizer begins a text with it
width = length - len(prefix)
rows = ids[: len(ids) // width * width].view(-1, width)
rows = torch.cat([prefix.expand(len(rows), -1), rows], dim=1)


def collate(batch: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of rows, each of whose tokens is predicted from those before it."""
    ids = torch.stack([row for (row,) in batch])
    return {"input_ids": ids, "labels": ids}


model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)  # torch.bfloat16
model = rope.patch(model, "yarn", target_length=length)  # before the training, so that it trains with the method
arguments = TrainingArguments(
    output_dir=folder / "run",
    max_steps=4,  # 400
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2,  # so many that all devices together read 64 rows a step
    learning_rate=2e-4,  # 2e-5
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=1,  # 20
    weight_decay=0.0,
    adam_beta2=0.95,
    max_grad_norm=1.0,
    bf16=torch.cuda.is_available(),
    gradient_checkpointing=False,  # True: slower, with less memory for activations
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model=model, args=arguments, train_dataset=TensorDataset(rows), data_collator=collate)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

# The folder's config states the method, so that stock transformers, vLLM and others load it without this package.
trainer.save_model(str(folder / "model"))
tokenizer.save_pretrained(folder / "model")
plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=model.dtype).eval()
with torch.no_grad():
    difference = (plain(rows[:1]).logits - model.eval()(rows[:1].to(model.device)).logits.cpu()).abs().max()
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; in stock transformers, logits differ by {difference:.1e}")
assert difference < 1e-2

"""Train a small model unlike the bundled one, so that no method is judged on one model alone.

    python benchmarks/docstring_model.py --folder build/bench/docstring-model

Qwen2 (biases on queries and keys), heads of 16 and not 64, theta 500,000 and not 10,000, a vocabulary of 1,024
byte-pair tokens and not bytes, trained at 128 tokens. The text is English: the docstrings of the installed NumPy,
SciPy, scikit-learn and PyTorch, read from their sources by `ast` and never imported. `constraints.txt` pins those
packages, so everyone trains on the same text. About a quarter of an hour on one CPU core.

The folder gets the model, its tokenizer, training.json, and the held-out documents as held-out/*.txt, so that every
command of the package reads them: `rope-ext sweep FOLDER --data 'FOLDER/held-out/*.txt'`. A folder that holds a trained
model is left as it is.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from training import take_steps, warmup_and_cosine
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SEED = 20240517
TRAINED_LENGTH = 128
VOCABULARY = 1024
END_OF_TEXT = "<|end|>"
PACKAGES = {"numpy": "numpy", "scipy": "scipy", "sklearn": "scikit-learn", "torch": "torch"}
"""Modules whose docstrings are read, and the distributions that they come from."""
HELD_OUT = (
    "numpy.linalg",
    "numpy.polynomial",
    "scipy.signal",
    "scipy.spatial",
    "sklearn.cluster",
    "sklearn.decomposition",
    "torch.distributions",
    "torch.optim",
)
"""Sub-packages that training never reads; each is one document."""
NOT_TEXT = frozenset({"test", "tests", "testing", "_vendor", "externals"})
BATCH = 32
PEAK_LEARNING_RATE, WARMUP_STEPS = 3e-3, 100


def documents() -> tuple[dict[str, str], dict[str, str]]:
    """The docstrings of every sub-package, joined: those to train on, and the held-out ones; no docstring is in two."""
    used: set[str] = set()
    parts: dict[str, list[str]] = {}
    files = [
        (".".join([package, *file.relative_to(root).parts[:-1]][:2]), file)
        for package in PACKAGES
        for root in [_root(package)]
        for file in sorted(root.rglob("*.py"))
        if NOT_TEXT.isdisjoint(file.relative_to(root).parts)
    ]
    for name, file in sorted(files, key=lambda each: each[0] not in HELD_OUT):  # held-out text is taken first
        new = [text for text in docstrings(file) if text not in used]
        used.update(new)
        parts.setdefault(name, []).extend(dict.fromkeys(new))
    texts = {name: "\n\n".join(some) for name, some in sorted(parts.items()) if some}
    return (
        {name: text for name, text in texts.items() if name not in HELD_OUT},
        {name: texts[name] for name in HELD_OUT},
    )


def _root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {PACKAGES[package]} is not installed; `make bench` installs what is needed")
    return Path(spec.origin).parent


def docstrings(file: Path) -> list[str]:
    """The docstrings of a module, its classes and its functions, in the order of the file."""
    with warnings.catch_warnings():  # of escape sequences in other people's strings
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(file.read_bytes())
        except SyntaxError:  # written for a newer Python
            return []
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = sorted(
        (node for node in ast.walk(tree) if isinstance(node, holders)), key=lambda node: getattr(node, "lineno", 0)
    )
    return [text for node in nodes if (text := ast.get_docstring(node))]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,  # of 16
        num_key_value_heads=4,
        max_position_embeddings=TRAINED_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts in one stream of token ids, (tokens,) int64, each closed by end-of-text."""
    ids = [token for text in tokenizer(texts)["input_ids"] for token in [*text, tokenizer.eos_token_id]]
    return torch.tensor(ids)


def loss_of(model: Qwen2ForCausalLM, rows: Tensor) -> Tensor:
    """Nats per token of (rows, tokens) int64, a scalar."""
    logits = model(rows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def train(folder: Path, steps: int, device: str) -> None:
    torch.manual_seed(SEED)
    training, held_out = documents()
    tokenizer = train_tokenizer(list(training.values()))
    stream, unread = encode(tokenizer, list(training.values())), encode(tokenizer, list(held_out.values()))
    model = Qwen2ForCausalLM(config()).to(device)
    print(f"{model.num_parameters():,} parameters, {len(stream):,} training tokens", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = warmup_and_cosine(optimizer, steps, WARMUP_STEPS)
    window = torch.arange(TRAINED_LENGTH + 1)

    def loss_of_step() -> Tensor:
        starts = torch.randint(0, len(stream) - TRAINED_LENGTH - 1, (BATCH, 1))
        return loss_of(model, stream[starts + window].to(device))

    started, cpu_started = time.perf_counter(), time.process_time()
    take_steps(optimizer, schedule, steps, loss_of_step, every=100, words=lambda loss: f"{loss:.3f} nats per token")
    model.eval()
    starts = torch.linspace(0, len(unread) - TRAINED_LENGTH - 2, 128).long()
    with torch.no_grad():
        held_out_loss = loss_of(model, unread[starts[:, None] + window].to(device)).item()
    texts = folder / "held-out"
    texts.mkdir(parents=True, exist_ok=True)
    for name, text in held_out.items():
        (texts / f"{name}.txt").write_text(text, encoding="utf-8")
    tokenizer.save_pretrained(folder)
    training_record = {
        "steps": steps,
        "batch": BATCH,
        "peak_learning_rate": PEAK_LEARNING_RATE,
        "parameters": model.num_parameters(),
        "training_tokens": len(stream),
        "held_out_nats_per_token": round(held_out_loss, 4),
        "seconds": round(time.perf_counter() - started),
        "cpu_seconds": round(time.process_time() - cpu_started),
        "text": {distribution: version(distribution) for distribution in PACKAGES.values()},
    }
    print(json.dumps(training_record), flush=True)
    (folder / "training.json").write_text(json.dumps(training_record, indent=1) + "\n", encoding="utf-8")
    model.save_pretrained(folder)  # last: a folder with weights is a complete one


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the trained model is kept")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if (arguments.folder / "model.safetensors").exists():
        print(f"{arguments.folder} holds a trained model")
        return
    train(arguments.folder, arguments.steps, arguments.device)


if __name__ == "__main__":
    main()

"""Small valid inputs of every kind that a command reads; made once, copied and damaged for every case."""

from __future__ import annotations

import gzip
import json
import shutil
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.folder_copies import save_patched_folder
from rope_ext_hf.cli.app import app
from rope_ext_hf.cli.console import quiet_transformers
from rope_ext_hf.reference import path as reference_folder
from tests.support.models import build, own_config

__all__ = ["Inputs", "make_inputs"]

FAMILIES = ("llama", "qwen3", "phi3", "gemma3", "gpt_neox", "deepseek_v3", "mixtral")
PATCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("yarn", {"factor": 4.0}),
    "restored": ("dca", {}),
    "dynamic": ("dynamic-ntk", {}),
    "stacked": ("linear", {"factor": 2.0}),
}
TEXT = Path(__file__).read_text(encoding="utf-8")
MEASURED = ["--lengths", "16,32", "--method", "yarn", "--factor", "4"]


@dataclass(frozen=True)
class Inputs:
    """Models, texts and folders that cases are made from.

    Attributes:
        models: folders of checkpoints by kind; some in Meta's format or of adapters.
        corpora: texts and tables by suffix.
        runs: finished runs: the command that made them, less --out, and the folder given as --out.
    """

    models: dict[str, Path]
    corpora: dict[str, Path]
    runs: dict[str, tuple[list[str], Path]]


def make_inputs(root: Path, *, families: Sequence[str] = FAMILIES) -> Inputs:
    """Write everything below a folder."""
    quiet_transformers()
    with warnings.catch_warnings(), redirect_stdout(None), redirect_stderr(None):
        warnings.simplefilter("ignore")  # of weights in a pairing that transformers does not run
        return _make_inputs(root, families)


def _make_inputs(root: Path, families: Sequence[str]) -> Inputs:
    made = {name: _save(root / name, build(name, vocab_size=320)) for name in families}
    plain = made["llama"]
    made |= _in_other_formats(root, plain)
    made["reference"] = root / "a copy of the reference"
    shutil.copytree(reference_folder(), made["reference"], ignore=shutil.ignore_patterns("*.py*"))
    for kind, (method, parameters) in PATCHED.items():
        model = rope.patch(build("llama", vocab_size=320), method, **parameters)
        if kind == "stacked":
            rope.patch(model, "ntk", factor=2.0, over="patched")
        save_patched_folder(model, plain, root / kind)
        made[kind] = root / kind
    corpora = _corpora(root / "corpora")
    text = str(corpora[".txt"])
    commands = {
        "perplexity": ["ppl", str(plain), *MEASURED, "--max-spans", "2", "--data", text],
        "passkey": ["passkey", str(plain), "--task", "copy", *MEASURED, "--lengths", "48", "--trials", "2"],
    }
    runs = {kind: (command, root / f"{kind} run") for kind, command in commands.items()}
    for command, out in runs.values():
        _run([*command, "--out", str(out)])
    return Inputs(made, corpora, runs)


def _run(arguments: list[str]) -> None:
    try:
        app(arguments)
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"{arguments} ended with {stop.code}") from stop


def _save(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    if model.config.model_type in ("qwen3", "phi3"):
        _word_tokenizer().save_pretrained(folder)
    else:
        shutil.copyfile(reference_folder() / "tokenizer_config.json", folder / "tokenizer_config.json")
    return folder


def _word_tokenizer() -> PreTrainedTokenizerFast:
    words = dict.fromkeys(["[UNK]", "<s>", "</s>", *sorted(set(TEXT.split()))][:320])
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="[UNK]")


def _in_other_formats(root: Path, plain: Path) -> dict[str, Path]:
    """The weights of one model in files of every format."""
    model = build("llama", vocab_size=320)
    tensors = load_file(plain / "model.safetensors")
    made = {"sharded": _save(root / "sharded", model, max_shard_size="100KB")}
    for kind, zipped in (("legacy bin", False), ("bin", True), ("sharded bin", True)):
        made[kind] = root / kind
        shutil.copytree(plain, made[kind], ignore=shutil.ignore_patterns("*.safetensors"))
        parts = {"pytorch_model.bin": tensors}
        if kind == "sharded bin":
            names = [f"pytorch_model-{part:05}-of-00002.bin" for part in (1, 2)]
            where = {name: names[index % 2] for index, name in enumerate(tensors)}
            parts = {file: {name: tensors[name] for name in tensors if where[name] == file} for file in names}
            index = {"metadata": {"total_size": 1}, "weight_map": where}
            (made[kind] / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
        for name, part in parts.items():
            torch.save(part, made[kind] / name, _use_new_zipfile_serialization=zipped)
    for kind, to, count in (("interleaved", "interleaved", 1), ("meta", "meta", 1), ("meta in two parts", "meta", 2)):
        made[kind] = root / kind
        rope.convert_checkpoint(plain, made[kind], to, model_parallel=count)
    made["converted back"] = root / "converted back"
    rope.convert_checkpoint(made["interleaved"], made["converted back"], "half")
    made["adapter"] = _adapter(root / "adapter", plain)
    made["own code"] = root / "own code"
    made["own code"].mkdir()
    (made["own code"] / "config.json").write_text(json.dumps(own_config("chatglm")), encoding="utf-8")
    return made


def _adapter(folder: Path, plain: Path) -> Path:
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 8}
    settings |= {"base_model_name_or_path": str(plain), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(2):
        for module, rows in (("q_proj", 64), ("v_proj", 32)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors |= {f"{name}.lora_A.weight": torch.ones(4, 64), f"{name}.lora_B.weight": torch.ones(rows, 4)}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def _corpora(folder: Path) -> dict[str, Path]:
    """One file of each kind."""
    (folder / "books").mkdir(parents=True)
    rows = [{"text": TEXT[start : start + 800], "name": "n"} for start in range(0, 4000, 800)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    ids = "".join(json.dumps({"text": list(range(3, 200))}) + "\n" for _ in range(3)).encode()
    files = {
        ".txt": TEXT.encode(),
        ".jsonl": lines,
        ".json": json.dumps(rows).encode(),
        ".txt.gz": gzip.compress(TEXT.encode()),
        ".jsonl.gz": gzip.compress(lines),
        ".ids.jsonl": ids,
    }
    for suffix, data in files.items():
        (folder / f"data{suffix}").write_bytes(data)
    made = {suffix: folder / f"data{suffix}" for suffix in files}
    for name in ("one.txt", "two.md", "three.jsonl"):
        (folder / "books" / name).write_bytes(lines if name.endswith("l") else TEXT.encode())
    if not (find_spec("pyarrow") and find_spec("datasets")):
        return made
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet")
    with pyarrow.output_stream(folder / "data.txt.zst", compression="zstd") as stream:
        stream.write(TEXT.encode())
    return made | {".parquet": folder / "data.parquet", ".txt.zst": folder / "data.txt.zst"}

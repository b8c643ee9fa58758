"""Folders of models in other formats than Hugging Face's: which format a folder is in, and what to do with it.

    check_format(Path("training-output"))  # raises an error that says both

Only the names of files are looked at. Where programs give files of different content the same name, the names of
tensors in a file decide, which are looked for in its bytes; nothing is unpickled.
"""

from __future__ import annotations

import os
import re
import shlex
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from rope_ext_hf.errors import CheckpointError, FileError, short
from rope_ext_hf.files.whole import layer_folders, resolve_inside
from rope_ext_hf.options.arguments import command_line

_DEPTH = 3  # of subfolders; a Trainer's folder has checkpoint-500/pytorch_model_fsdp_0/.metadata
_MOST_NAMES = 5_000  # of files and folders: a home folder, or /, is not listed to its end
_MOST_READ = 16  # files of one format whose content is looked at
_MOST_BYTES = 16 * 2**20  # of a list of tensors; that of a model of 100,000 tensors takes 10 MB
_HF_WEIGHTS = tuple(
    f"{stem}{end}"
    for stem in ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
    for end in ("", ".index.json")
)
_TO_HF = command_line("convert", "WHERE", "NEW", to="hf").replace("WHERE", "{where}")  # which is quoted later
_STATE_DICT = "`model.save_pretrained(NEW, state_dict=WEIGHTS)` in Python then writes a folder for transformers"


@dataclass(frozen=True)
class _Format:
    """A format, the files by which it is known, and what to do with a folder in it.

    Attributes:
        name: a phrase that completes "it holds".
        files: patterns of relative file names; the first one that a file matches counts. A star stands for slashes too.
        advice: a sentence that says what to do. {where} stands for a folder and {file} for a file, both quoted for a
            shell; NEW for a folder to be written.
        contains: bytes that a matching file must contain, such as the name of a tensor.
        up: the number of levels from the matching file up to {where}.
    """

    name: str
    files: tuple[str, ...]
    advice: str
    contains: bytes = b""
    up: int = 1


_FORMATS = (
    _Format(
        "weights for transformers",
        tuple(f"*/{name}" for name in _HF_WEIGHTS),
        "give {where}",
    ),
    _Format(
        "a model in Meta's own format",
        ("consolidated.*.pth", "*/consolidated.*.pth"),
        f"`{_TO_HF}` writes a folder for transformers (params.json must be there too)",
    ),
    _Format(
        "a model in Mistral's own format",
        ("consolidated*.safetensors", "*/consolidated*.safetensors"),
        f"`{_TO_HF}` writes a folder for transformers (params.json must be there too)",
    ),
    _Format(
        "a checkpoint of NeMo 2",
        ("context/io.json", "*/context/io.json"),
        "`nemo.collections.llm.export_ckpt(path={where}, target='hf', output_path=NEW)` in Python writes a folder "
        "for transformers",
        up=2,
    ),
    _Format(
        "a checkpoint of NeMo",
        ("*.nemo",),
        "scripts/checkpoint_converters of NeMo has a converter to Hugging Face for each family; give the folder that "
        "it writes",
    ),
    _Format(
        "a distributed checkpoint of Megatron",
        ("common.pt", "*/common.pt"),
        "`AutoBridge.from_hf_pretrained(MODEL).export_ckpt({where}, NEW)` of Megatron-Bridge writes a folder for "
        "transformers, where MODEL is the Hub id of a model with the same sizes",
    ),
    _Format(
        "a checkpoint of Megatron-LM in its older format",
        ("*model_optim_rng.pt", "*model_rng.pt"),
        "train for no steps with --ckpt-convert-format torch_dist and --ckpt-convert-save, then export what that "
        "writes with Megatron-Bridge (`AutoBridge.from_hf_pretrained(MODEL).export_ckpt(FOLDER, NEW)`)",
    ),
    _Format(
        "a checkpoint of DeepSpeed",
        ("*_model_states.pt", "*_optim_states.pt"),
        "`python -m deepspeed.utils.zero_to_fp32 {where} {where} --safe_serialization` writes its weights as "
        "safetensors into the folder, in which config.json must lie",
        up=2,
    ),
    _Format(
        "a distributed checkpoint of torchtune",
        (".metadata", "*/.metadata"),
        "resume the recipe once with torchtune's FullModelHFCheckpointer, which writes folders for transformers",
        contains=b"layers.0.attn.q_proj.weight",
    ),
    _Format(
        "a sharded checkpoint of FSDP",
        ("*pytorch_model_fsdp*/.metadata",),
        "`accelerate merge-weights {where} NEW` writes NEW/model.safetensors; copy config.json and the tokenizer "
        "beside it",
    ),
    _Format(
        "a distributed checkpoint of torch (DCP)",
        ("*model*/.metadata", ".metadata", "*/.metadata"),
        "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch {where} FILE` writes it into one file; "
        f"{_STATE_DICT}",
    ),
    _Format(
        "parts of FSDP that only as many processes as have written them can load",
        ("*pytorch_model_fsdp*_rank*.bin",),
        "load the checkpoint in the training, and save it with the state dict type FULL_STATE_DICT or "
        "SHARDED_STATE_DICT",
    ),
    _Format(
        "a model of LitGPT",
        ("lit_model.pth", "*/lit_model.pth"),
        "`litgpt convert_from_litgpt {where} NEW` writes NEW/model.pth; rename it to pytorch_model.bin, and copy "
        "config.json and the tokenizer beside it",
    ),
    _Format(
        "an adapter of LitGPT",
        ("*lit_model.pth.*",),
        "`litgpt merge_lora {where}` writes lit_model.pth; then `litgpt convert_from_litgpt {where} NEW` writes "
        "NEW/model.pth, to be renamed to pytorch_model.bin",
    ),
    _Format(
        "a model of gpt-fast",
        ("*.pth", "*.pt"),
        "gpt-fast has no way back to transformers; give the Hugging Face folder that it was made from",
        contains=b"layers.0.attention.wqkv.",
    ),
    _Format(
        "a model under torchtune's names",
        ("*.bin", "*.pt", "*.pth"),
        "`torchtune.models.convert_weights.tune_to_hf(WEIGHTS, ...)` in Python returns them under those of "
        f"transformers; {_STATE_DICT}. FullModelHFCheckpointer in the recipe saves such folders at once",
        contains=b"layers.0.attn.q_proj.weight",
    ),
    _Format(
        "a state dict under the names of transformers",
        ("*pytorch_model_fsdp*.bin", "*.bin", "*.pth", "*.pt", "*.ckpt"),
        "if {file} holds nothing else, rename it to pytorch_model.bin, and put config.json beside it; if they are "
        f"one entry of it, {_STATE_DICT}",
        contains=b"model.layers.0.self_attn.",
    ),
    _Format(
        "an adapter of MLX",
        ("adapters.safetensors", "*adapters.safetensors"),
        "`mlx_lm.fuse --model MODEL --adapter-path {where} --save-path NEW --dequantize` writes the model with the "
        "adapter merged into it",
    ),
    _Format(
        "weights of MLX as NumPy saves them",
        ("*weights*.npz",),
        "give the Hugging Face folder that they were made from",
    ),
    _Format(
        "a GGUF file",
        ("*.gguf", "*.GGUF"),
        "give the file itself, {file}; or unpack it: `"
        + command_line("convert", "FILE", "NEW", to="hf", dequantize="bfloat16").replace("FILE", "{file}")
        + "`",
    ),
    _Format(
        "weights quantised by ExLlama",
        ("output*.safetensors",),
        "transformers does not read them; give the folder that they were made from",
    ),
    _Format(
        "an ONNX model",
        ("*.onnx",),
        "give the folder that it was exported from, and export its patched copy",
    ),
    _Format(
        "an OpenVINO model",
        ("*openvino*.xml",),
        "give the folder that it was exported from, and export its patched copy",
    ),
    _Format(
        "a model that was built for TensorRT-LLM or MLC",
        ("*rank*.engine", "*rank*.safetensors", "*params_shard_*.bin"),
        "give the folder that it was built from, and build its patched copy",
    ),
    _Format(
        "weights of TensorFlow",
        ("*tf_model.h5", "*tf_model-*.h5"),
        "transformers 4 still reads them: `AutoModelForCausalLM.from_pretrained({where}, from_tf=True)."
        "save_pretrained(NEW)`",
    ),
    _Format(
        "weights of Flax",
        ("*flax_model*.msgpack",),
        "transformers 4 still reads them: `AutoModelForCausalLM.from_pretrained({where}, from_flax=True)."
        "save_pretrained(NEW)`",
    ),
    _Format(
        "a checkpoint of Orbax (JAX, MaxText)",
        ("*manifest.ocdbt", "*_CHECKPOINT_METADATA"),
        "export it with the program that has written it; MaxText has a converter to Hugging Face",
    ),
    _Format(
        "parts of a model without the index that lists them",
        ("model-*-of-*.safetensors", "pytorch_model-*-of-*.bin"),
        "get model.safetensors.index.json (or pytorch_model.bin.index.json) from where {file} came from",
    ),
    _Format(
        "safetensors under another name",
        ("*.safetensors",),
        "if {file} is the whole model, rename it to model.safetensors",
    ),
    _Format(
        "the state of a training without its weights",
        ("*trainer_state.json", "*training_args.bin", "*optimizer.pt", "*optimizer.bin", "*recipe_state.pt"),
        "save the model itself with `trainer.save_model(NEW)`",
    ),
)


def _other_format(folder: Path) -> str:
    """Return two sentences that say in which other format than Hugging Face's a folder is, and what to do; or "".

    They begin with "It holds". Links to folders are not followed, and files that lie outside the folder are not read.
    """
    names = sorted(_file_names(folder), key=_by_number)
    return _sentences(folder, names, lambda name, text: _contains(folder, name, text))


def format_on_hub(name: str, files: Iterable[str]) -> str:
    """Return what `_other_format` does for a Hub repository, given the names of its files.

    Formats that only the content of a file shows stay unknown.
    """
    known = _sentences(Path("FOLDER"), sorted(files, key=_by_number), lambda name, text: False)
    download = f"`hf download {shlex.quote(name)} --local-dir FOLDER`"
    return f"{known} (after {download})" if known else ""


def check_format(folder: Path) -> None:
    """Raise CheckpointError for a folder without weights for transformers that is in another format known here."""
    known = "" if has_weights(folder) else _other_format(folder)
    if known:
        raise CheckpointError(f"{str(folder)!r} holds no weights that transformers loads. {known}")


def check_model_files(folder: Path) -> None:
    """Raise CheckpointError for a folder that holds GGUF files instead of a config; the message names the files."""
    if any((folder / name).exists() for name in ("config.json", "adapter_config.json", "params.json")):
        return
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() == ".gguf" and not path.is_dir())
    if not names:
        return
    listed = ", ".join(map(short, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    raise CheckpointError(
        f"{str(folder)!r} holds GGUF files and no config.json; give the path of the file instead of the folder: "
        f"{str(folder / names[0])!r}" + (f" (the folder has {listed})" if len(names) > 1 else "")
    )


def check_packed(config: Mapping[str, Any], folder: str | Path) -> None:
    """Raise CheckpointError for a model whose weights are packed in a way that transformers does not read.

    Args:
        config: the values of its config.json.
        folder: its folder or Hub id.
    """
    settings = config.get("quantization_config") or config.get("quantization")
    if not isinstance(settings, Mapping):
        return
    method = settings.get("quant_method")
    if method in ("exl2", "exl3"):
        raise CheckpointError(
            f"the weights of {short(str(folder))!r} are quantised by ExLlama ({method}), which transformers does not "
            "read; give the folder that they were made from"
        )
    if method is None and {"bits", "group_size"} <= settings.keys():
        line = f"mlx_lm.convert --hf-path {shlex.quote(str(folder))} --mlx-path NEW --dequantize"
        raise CheckpointError(
            f"the weights of {short(str(folder))!r} are quantised by MLX, which transformers does not read; `{line}` "
            "writes a folder for transformers with unpacked weights"
        )


def has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights that transformers would load."""
    return any((folder / name).exists() for name in _HF_WEIGHTS)


def without_config(folder: Path) -> str:
    """Return sentences about a folder without config.json, as `_other_format` does.

    Weights for transformers that lie in it count as well.
    """
    weights = next((name for name in _HF_WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        return _other_format(folder)
    missing = "adapter_config.json" if weights.startswith("adapter") else "config.json"
    return f"It holds {weights} without {missing}: copy {missing}, and the tokenizer, of the model that was trained"


def _sentences(folder: Path, names: list[str], contains: Callable[[str, bytes], bool]) -> str:
    """Return the sentences of `_other_format`.

    Args:
        folder: the folder, for the paths in the sentences.
        names: the relative names of the files in it, in their order.
        contains: returns whether the file of this name contains these bytes.
    """
    for known in _FORMATS:
        matching = next(filter(None, (_matching(names, pattern, known, contains) for pattern in known.files)), [])
        if not matching:
            continue
        newest = folder / matching[-1]
        where = newest.parents[known.up - 1] if len(PurePosixPath(matching[-1]).parts) >= known.up else folder
        quoted = {"where": shlex.quote(str(where)), "file": shlex.quote(str(newest))}
        return f"It holds {_named(known, matching)}: {known.advice.format(**quoted)}"
    return ""


def _named(known: _Format, matching: list[str]) -> str:
    """Return the name of a format with the subfolder, or the number of them, in which its files are."""
    folders = list(dict.fromkeys(str(PurePosixPath(name).parent) for name in matching))
    if folders == ["."]:
        return known.name
    if len(folders) == 1:
        return f"{known.name} in {short(repr(folders[0]))}"
    return f"{known.name} in {len(folders)} subfolders, the last of which is {short(repr(folders[-1]))}"


def _matching(names: Iterable[str], pattern: str, known: _Format, contains: Callable[[str, bytes], bool]) -> list[str]:
    """Return the names that match a pattern, in their order, of files that contain the bytes of the format.

    The state of an optimizer has files with the same endings, and with the names of the same tensors.
    """
    matching = [name for name in names if fnmatchcase(name, pattern)]
    if "optimizer" not in pattern:
        matching = [name for name in matching if not re.search(r"(^|/)optimizer", name)]
    if not known.contains:
        return matching
    return [name for name in matching[-_MOST_READ:] if contains(name, known.contains)]


def _file_names(folder: Path) -> Iterator[str]:
    """Yield the relative names of the files in a folder, with slashes; deep and very many ones are left out.

    Layers that sentence-transformers puts on top of a model are left out too: their files have the names of a model's.
    """
    layers, count = layer_folders(folder), 0
    for path, subfolders, files in os.walk(folder):
        inner = Path(path).relative_to(folder)
        subfolders[:] = [] if len(inner.parts) >= _DEPTH else [s for s in subfolders if str(inner / s) not in layers]
        yield from ((inner / name).as_posix() for name in files)
        count += len(files) + len(subfolders)
        if count > _MOST_NAMES:
            return


def _by_number(name: str) -> list[tuple[bool, str]]:
    """Return a sort key by which numbers in names are ordered by value: checkpoint-1000 after checkpoint-500."""
    return [(part.isdigit(), part.zfill(20) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]


def _contains(folder: Path, name: str, text: bytes) -> bool:
    """Return whether a list of tensors has these bytes: a file of torch.save, or the list itself.

    A file that cannot be read, or leads out of the folder, does not have them.
    """
    try:
        with resolve_inside(folder, name).open("rb") as file:
            return text in _list_of_tensors(file)
    except (OSError, FileError, zipfile.BadZipFile, RuntimeError, ValueError, EOFError, zlib.error):
        return False


def _list_of_tensors(file: BinaryIO) -> bytes:
    """Return the bytes in which a file names its tensors."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        return file.read(_MOST_BYTES)
    with zipfile.ZipFile(file) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if name is None:
            return b""
        with archive.open(name) as pickled:
            return pickled.read(_MOST_BYTES)

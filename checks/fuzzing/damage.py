"""Damage to valid files: bytes, JSON, safetensors, files of torch.save, links and pipes.

    draw = random.Random(0)
    data, what = damage_json(draw, Path("config.json").read_bytes())
    what = damage_folder(draw, Path("model"), elsewhere)     # changes one to three files, never through a hard link

Every function draws from the generator that it is given and from nothing else.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rope_ext_hf.models.config_keys import PAIRING_KEY, PATCH_KEY

__all__ = [
    "ODD_TEXTS",
    "damage_bytes",
    "damage_file",
    "damage_folder",
    "damage_json",
    "damage_value",
    "odd_value",
    "write_odd_gguf",
]

_RAW = {
    "@digits@": "9" * 5000,
    "@deep list@": "[" * 5000 + "]" * 5000,
    "@deep object@": '{"a":' * 5000 + "1" + "}" * 5000,
    "@overflow@": "1e999",
}
"""Stands for JSON that `json.dumps` cannot write."""

ODD_TEXTS: tuple[str, ...] = (
    "",
    " ",
    "\n",
    "nan",
    "yarn",
    "default",
    "llama",
    "float32",
    "int8",
    "auto",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202eright to left",
    "\N{GREEK SMALL LETTER MU}\N{PILE OF POO}",
    "[/red][bold]",
    "$a$ $\\frac",
    "%s%n{0}{x!r}",
    "a" * 3000,
    " b" * 3000,
    "\x01" * 2000,
    "../../etc/passwd",
    "/dev/zero",
    "C:\\x",
    "owner/name",
    "hf:owner/name",
    "None",
    "true",
)
_ODD_NUMBERS: tuple[float, ...] = (
    *(0, -1, 1, 2, 3, 5, 7, 63, 255, 1024, 65_537, 2**31 - 1, 2**31, 2**53, 2**63, 10**30, -(2**63)),
    *(0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
)
_ROPE_KEYS = (
    *("rope_type", "type", "factor", "rope_theta", "beta_fast", "beta_slow", "attention_factor", "mscale"),
    *("mscale_all_dim", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "truncate"),
    *(
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "full_attention",
        "sliding_attention",
        "mrope_section",
    ),
)
_CONFIG_KEYS = (
    *(
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "head_dim",
        "hidden_size",
        "vocab_size",
    ),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "model_type"),
    *("architectures", "layer_types", "sliding_window", "dtype", "torch_dtype", "text_config", "vision_config"),
    *(
        "auto_map",
        "quantization_config",
        "tie_word_embeddings",
        "hidden_act",
        "_attn_implementation",
        "attn_implementation",
    ),
    *("pad_token_id", "bos_token_id", "eos_token_id", "num_labels", "id2label", "label2id", "is_decoder", "use_cache"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "kv_lora_rank", "qk_rope_head_dim", "rms_norm_eps"),
    *("original_max_position_embeddings", "tokenizer_class", "transformers_version", "_name_or_path", "problem_type"),
    *("base_model_tp_plan", "generation_config", "use_bidirectional_attention", "pruned_heads", "initializer_range"),
    *(PATCH_KEY, PAIRING_KEY),
)
_MODEL_TYPES = (
    "llama",
    "qwen2",
    "gemma3",
    "phi3",
    "gpt2",
    "bert",
    "t5",
    "mamba",
    "falcon",
    "chatglm",
    "llama9",
    "llava",
)


def odd_value(draw: random.Random, depth: int = 0) -> Any:
    """A JSON value that nobody expects at a place."""
    kind = draw.randrange(10)
    if kind < 4:
        return draw.choice(_ODD_NUMBERS)
    if kind < 6:
        return draw.choice(ODD_TEXTS)
    if kind == 6:
        return draw.choice((None, True, False, [], {}, [[]], "\ud800", *_RAW))
    if depth > 2:
        return None
    if kind == 7:
        return [odd_value(draw, depth + 1)] * draw.choice((1, 2, 3, 8, 1000 if depth == 0 else 16))
    if kind == 8:
        return {draw.choice(_ROPE_KEYS): odd_value(draw, depth + 1) for _ in range(draw.randint(1, 5))}
    return {draw.choice(_CONFIG_KEYS): odd_value(draw, depth + 1) for _ in range(draw.randint(1, 3))}


def _likely_value(draw: random.Random, key: str) -> Any:
    """A value of the right kind, or nearly."""
    if key in ("rope_scaling", "rope_parameters"):
        names = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "su", "mrope", "proportional", "nope")
        settings = {draw.choice(("rope_type", "type")): draw.choice(names), "rope_theta": 10_000.0, "factor": 4.0}
        settings |= {draw.choice(_ROPE_KEYS): odd_value(draw, 2) for _ in range(draw.randrange(4))}
        return settings if draw.random() < 0.8 else {"full_attention": settings, "sliding_attention": settings}
    if key == "model_type":
        return draw.choice(_MODEL_TYPES)
    if key == "architectures":
        return [
            draw.choice(("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaModel", "Nope", "PreTrainedModel"))
        ]
    if key == "auto_map":
        return {draw.choice(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")): "evil.Evil"}
    if key == "quantization_config":
        methods = ("bitsandbytes", "gptq", "awq", "fp8", "compressed-tensors", "nope")
        return {"quant_method": draw.choice(methods), "bits": 4, "load_in_4bit": True}
    if key == PAIRING_KEY:
        return draw.choice(("half", "interleaved", "both"))
    if key == "layer_types":
        return [draw.choice(("full_attention", "sliding_attention", "linear_attention", "nope"))] * draw.randint(0, 4)
    return odd_value(draw)


def _near_value(draw: random.Random, key: Any, value: Any) -> Any:
    """A value like the one that is there."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice(
            (value + 1, value - 1, 2 * value, value // 2, -value, float(value), str(value), 1000 * value)
        )
    if isinstance(value, list) and value:
        return draw.choice((value[1:], value * 2, value[::-1], value[0]))
    return _likely_value(draw, str(key))


# --- bytes ------------------------------------------------------------------------------------------------------------


def damage_bytes(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Some bytes changed, lost or added; what was done."""
    kind = draw.randrange(9)
    at = draw.randrange(len(data) + 1)
    if kind == 0:
        return b"", "emptied"
    if kind == 1:
        return data[:at], f"cut at byte {at}"
    if kind == 2:
        return data + draw.randbytes(draw.choice((1, 8, 1000))), "bytes appended"
    if kind == 3:
        return data[:at] + draw.randbytes(draw.randint(1, 16)) + data[at:], f"bytes inserted at {at}"
    if kind == 4:
        return data[:at] + data[at + draw.randint(1, 100) :], f"bytes lost at {at}"
    if kind == 5:
        return b"\xff\xfe" + data.decode("latin-1").encode("utf-16-le"), "as UTF-16"
    if kind == 6:
        return b"\xef\xbb\xbf" + data, "with a byte-order mark"
    if kind == 7:
        return draw.randbytes(draw.choice((1, 100, 5000))), "random bytes"
    changed = bytearray(data)
    for _ in range(draw.choice((1, 2, 10)) if changed else 0):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed), "bytes changed"


# --- JSON -------------------------------------------------------------------------------------------------------------


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key of a JSON value."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(min(len(value), 50)):
            yield value, key
            yield from _places(value[key])


def to_json(value: Any) -> bytes:
    """A value as JSON, with the raw texts that stand in it."""
    text = json.dumps(value, indent=1)
    for name, raw in _RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode()


def damage_json(draw: random.Random, data: bytes, keys: tuple[str, ...] = _CONFIG_KEYS) -> tuple[bytes, str]:
    """JSON with one to three values changed, removed, renamed or added, or its text damaged.

    Args:
        keys: names of values that may be added.
    """
    value = json.loads(data)
    if draw.random() < 0.1:
        return damage_bytes(draw, data)
    if draw.random() < 0.03:
        return to_json(odd_value(draw)), "another value"
    done = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = list(_places(value))
        kind = draw.randrange(8)
        if kind == 0 and isinstance(value, dict):
            key = draw.choice(keys)
            value[key] = _likely_value(draw, key) if draw.random() < 0.7 else odd_value(draw)
            done.append(f"{key}={_shown(value[key])}")
            continue
        if not places:
            break
        holder, key = draw.choice(places)
        if kind == 1:
            holder.pop(key)
            done.append(f"without {_shown(key)}")
        elif kind == 2 and isinstance(holder, dict):
            new = draw.choice((*keys, *ODD_TEXTS))
            holder[new] = holder.pop(key)
            done.append(f"{_shown(key)} renamed to {_shown(new)}")
        elif kind == 3:
            other, name = draw.choice(places)
            holder[key] = json.loads(json.dumps(other.get(name) if isinstance(other, dict) else None))
            done.append(f"{_shown(key)} holds the value of {_shown(name)}")
        elif kind in (4, 5):
            holder[key] = _near_value(draw, key, holder[key])
            done.append(f"{_shown(key)}={_shown(holder[key])}")
        else:
            holder[key] = odd_value(draw)
            done.append(f"{_shown(key)}={_shown(holder[key])}")
    return to_json(value), ", ".join(done) or "unchanged"


def damage_value(draw: random.Random, path: Path) -> str:
    """One value of a JSON object changed or added; the file is replaced, so that hard links keep the old content."""
    value = json.loads(path.read_bytes())
    added = draw.random() < 0.3
    holder, key = (value, draw.choice(_CONFIG_KEYS)) if added else draw.choice(list(_places(value)))
    kind = draw.randrange(3)
    if kind == 0:
        holder[key] = odd_value(draw)
    else:
        holder[key] = _likely_value(draw, str(key)) if kind == 1 or added else _near_value(draw, key, holder[key])
    path.unlink()
    path.write_bytes(to_json(value))
    return f"{path.name}: {_shown(key)}={_shown(holder[key])}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


# --- safetensors ------------------------------------------------------------------------------------------------------


def damage_safetensors(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Another header, another length of it, or other numbers."""
    kind = draw.randrange(6)
    size = int.from_bytes(data[:8], "little")
    if kind == 0:
        size = draw.choice((0, 1, size - 1, size + 1, len(data), 10**8, 2**40, 2**63, 2**64 - 1))
        return size.to_bytes(8, "little") + data[8:], f"header length {size}"
    if kind in (1, 2):
        header = json.loads(data[8 : 8 + size])
        if kind == 1:
            name = draw.choice([name for name in header if name != "__metadata__"])
            entry = header[name]
            field = draw.choice(("dtype", "shape", "data_offsets", "name"))
            if field == "name":
                new = draw.choice((*ODD_TEXTS, f"{name}.0", name.replace("layers.", "layers.9"), "\ud800"))
                header[new] = header.pop(name)
                what = f"{name} renamed to {_shown(new)}"
            else:
                choices = {
                    "dtype": (
                        "F64",
                        "F16",
                        "BF16",
                        "I64",
                        "U8",
                        "BOOL",
                        "F8_E4M3",
                        "F4",
                        "nope",
                        None,
                        odd_value(draw),
                    ),
                    "shape": (
                        [],
                        [0],
                        entry["shape"][::-1],
                        [-1],
                        [2**62, 4],
                        [1] * 70,
                        [1, *entry["shape"]],
                        odd_value(draw),
                    ),
                    "data_offsets": ([0, 0], [0, 2**63], entry["data_offsets"][::-1], [1, 5], [0], odd_value(draw)),
                }
                entry[field] = draw.choice(choices[field])
                what = f"{name}: {field} {_shown(entry[field])}"
            text = to_json(header)
        else:
            text, what = damage_json(draw, json.dumps(header).encode())
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + data[8 + size :], what
    if kind == 3:
        at = draw.randrange(8 + size, len(data))
        fill = draw.choice((b"\xff", b"\x00", b"\x7f\x80"))
        count = draw.choice((2, 64, 4096, len(data)))
        return (data[:at] + fill * count)[: len(data)].ljust(len(data), b"\x01"), f"numbers from byte {at} on: {fill!r}"
    return damage_bytes(draw, data)


# --- torch.save -------------------------------------------------------------------------------------------------------


class _Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def _hostile_pickle(draw: random.Random, elsewhere: Path) -> tuple[bytes, str]:
    canary = str(elsewhere / "run by a pickle")
    kind = draw.randrange(9)
    if kind == 0:
        return pickle.dumps({"a": _Call(os.mkdir, canary)}, protocol=2), "calls os.mkdir"
    if kind == 1:
        return pickle.dumps(_Call(exec, f"import os; os.mkdir({canary!r})"), protocol=2), "calls exec"
    if kind == 2:
        return b"\x80\x02" + b"(" * 200_000 + b".", "marks alone"
    if kind == 3:
        return b"\x80\x02]" + b"q\x00]h\x00a" * 100_000 + b".", "lists in lists"
    if kind == 4:
        return b"\x80\x02\x8a\xff" + b"\x7f" * 10, "a number that is cut off"
    if kind == 5:
        return b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b"x", "a string of 2**62 bytes"
    if kind == 6:
        return b"\x80\x02)" + b"\x85" * 100_000 + b".", "nested tuples"
    if kind == 7:
        return b"\x80\x02}" + b")" + b"\x85" * 1000 + b"K\x01s.", "a nested tuple as a key"
    return pickle.dumps(odd_value(draw), protocol=draw.choice((0, 2, 4))), "another value"


def damage_torch(draw: random.Random, data: bytes, elsewhere: Path) -> tuple[bytes, str]:
    """A hostile pickle in a file of torch.save, members of the archive changed, or bytes changed."""
    kind = draw.randrange(5)
    if kind > 2:
        return damage_bytes(draw, data)
    if not zipfile.is_zipfile(io.BytesIO(data)):
        if kind == 0:
            hostile, what = _hostile_pickle(draw, elsewhere)
            at = data.find(b"\x80\x02", 20 if draw.random() < 0.5 else 0)
            return data[: max(at, 0)] + hostile + data[max(at, 0) :], f"a pickle that {what}"
        return damage_bytes(draw, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = draw.choice(list(members))
    pickled = next(name for name in members if name.endswith("data.pkl"))
    if kind == 0:
        members[pickled], what = _hostile_pickle(draw, elsewhere)
        what = f"data.pkl: {what}"
    elif kind == 1:
        changed = draw.choice((name, pickled))
        members[changed], what = damage_bytes(draw, members[changed])
        what = f"{changed}: {what}"
    else:
        content = members.pop(name)
        new = draw.choice((None, "../../escaped", "/escaped", f"other/{name}", "a" * 300))
        if new is not None:
            members[new] = content
        what = f"member {name} is now {new and new[:20]}"
    method = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return out.getvalue(), what


# --- files ------------------------------------------------------------------------------------------------------------


def damage_file(draw: random.Random, path: Path, elsewhere: Path) -> str:
    """Damage the content of a file by its kind; the file is replaced, so that hard links keep the old content."""
    data = path.read_bytes()
    try:
        data, what = _damage_content(draw, path.suffix, data, elsewhere)
    except Exception:  # an earlier damage made it unreadable as a file of its kind
        data, what = damage_bytes(draw, data)
    path.unlink()
    path.write_bytes(data)
    return f"{path.name}: {what}"


def _damage_content(draw: random.Random, suffix: str, data: bytes, elsewhere: Path) -> tuple[bytes, str]:
    if suffix == ".gz" and draw.random() < 0.5:
        inner, what = damage_bytes(draw, gzip.decompress(data))
        return gzip.compress(inner), what
    if suffix == ".safetensors":
        return damage_safetensors(draw, data)
    if suffix in (".bin", ".pth"):
        return damage_torch(draw, data, elsewhere)
    if suffix == ".json":
        keys = (*json.loads(data), *_CONFIG_KEYS) if data[:1] == b"{" else _CONFIG_KEYS
        return damage_json(draw, data, keys)
    if suffix == ".jsonl" and draw.random() < 0.7:
        lines = data.splitlines()
        at = draw.randrange(len(lines))
        change, what = damage_json(draw, lines[at])
        lines[at : at + 1] = [change.replace(b"\n", b"")] * draw.choice((1, 1, 2))
        return b"\n".join(lines) + b"\n", f"line {at + 1}: {what}"
    return damage_bytes(draw, data)


def _replace(draw: random.Random, path: Path, elsewhere: Path) -> str:
    """Put something other than a plain file in a file's place."""
    kind = draw.randrange(9)
    data = path.read_bytes() if kind == 1 else b""
    path.unlink()
    if kind == 0:
        return f"{path.name} removed"
    if kind == 1:
        (elsewhere / path.name).write_bytes(data)
        path.symlink_to(elsewhere / path.name)
        return f"{path.name} is a link out of the folder"
    if kind == 2:
        os.mkfifo(path)
        return f"{path.name} is a FIFO"
    if kind == 3:
        path.mkdir()
        return f"{path.name} is a folder"
    target = ("/dev/zero", "/dev/full", "nowhere", path.name, ".")[kind - 4]
    path.symlink_to(target)
    return f"{path.name} is a link to {target}"


def _heavy_or_special(folder: str, names: list[str]) -> list[str]:
    """Weights, and what cannot be copied: a FIFO that earlier damage has put there."""
    return [name for name in names if name.endswith((".safetensors", ".bin")) or Path(folder, name).is_fifo()]


def _add(draw: random.Random, folder: Path, elsewhere: Path) -> str:
    """Add something that does not belong there."""
    odd = os.fsdecode(b"\xff\xfe odd")
    name = draw.choice((odd, "a\nb", "\x1b[31m.json", "n" * 250, "config.json.part", "$x$.png", "evil.py", "a b"))
    path = folder / name
    kind = draw.randrange(5)
    if path.exists() or kind == 4:
        path = next(path for path in (folder / f"sub{number}" for number in range(100)) if not path.exists())
        shutil.copytree(folder, path, symlinks=True, ignore=_heavy_or_special)
        return "a copy of itself inside"
    if kind == 0:
        path.symlink_to(elsewhere / "secret")
        return f"{name!r}: a link out of the folder"
    if kind == 1:
        os.mkfifo(path)
        return f"{name!r}: a FIFO"
    if kind == 2:
        path.symlink_to(folder)
        return f"{name!r}: a link to the folder itself"
    code = f"import os; os.mkdir({str(elsewhere / 'run by a file')!r})\n"
    path.write_text(code, encoding="utf-8")
    return f"{name!r}: a file"


def damage_folder(draw: random.Random, folder: Path, elsewhere: Path, most: int = 3) -> str:
    """Damage one to three files of a folder, the small ones more often; what was done."""
    done = []
    for _ in range(draw.choice((1, 1, 1, 2, most))):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        if draw.random() < 0.06 or not files:
            done.append(_add(draw, folder, elsewhere))
            continue
        weights = [3 if path.suffix in (".json", ".jsonl") else 1 for path in files]
        path = draw.choices(files, weights)[0]
        done.append((_replace if draw.random() < 0.1 else damage_file)(draw, path, elsewhere))
    return "; ".join(done)


# --- GGUF -------------------------------------------------------------------------------------------------------------

_ODD_FLOATS = (0.0, -0.0, -1.0, 0.5, 1.0, 2.0, 32.0, 1e-38, 3e38, float("nan"), float("inf"), float("-inf"))
_GGUF_NUMBERS = (
    *("freq_base", "scaling.factor", "scaling.attn_factor", "scaling.yarn_beta_fast", "scaling.yarn_beta_slow"),
    *("scaling.yarn_ext_factor", "scaling.yarn_attn_factor", "scaling.original_context_length", "dimension_count"),
)


def write_odd_gguf(draw: random.Random, path: Path) -> str:
    """Write a GGUF file without weights whose rotary embedding has numbers and types that nobody expects."""
    import gguf
    import numpy as np

    architecture = draw.choice(("llama", "phi3", "qwen3", "deepseek2", "nope"))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32(f"{architecture}.context_length", draw.choice((0, 1, 4096, 2**32 - 1)))
    writer.add_uint32(f"{architecture}.embedding_length", draw.choice((0, 64, 512, 2**32 - 1)))
    writer.add_uint32(f"{architecture}.attention.head_count", draw.choice((0, 1, 4, 8)))
    done = []
    if draw.random() < 0.7:
        kind = draw.choice(("none", "linear", "yarn", "longrope", "nope"))
        writer.add_string(f"{architecture}.rope.scaling.type", kind)
        done.append(kind)
    for name in draw.sample(_GGUF_NUMBERS, draw.randint(0, 4)):
        key = f"{architecture}.rope.{name}"
        if draw.random() < 0.7:
            value: Any = draw.choice(_ODD_FLOATS)
            writer.add_float32(key, value)
        elif draw.random() < 0.5:
            value = draw.choice((0, 1, 7, 64, 2**31, 2**32 - 1))
            writer.add_uint32(key, value)
        else:
            value = draw.choice(("", "nan", "yarn", "a" * 3000))
            writer.add_string(key, value)
        done.append(f"{name}={_shown(value)}")
    for name in draw.sample(("rope_freqs.weight", "rope_factors_long.weight"), draw.randint(0, 2)):
        values = [draw.choice(_ODD_FLOATS) if draw.random() < 0.2 else 1.0 for _ in range(draw.choice((1, 8, 32, 64)))]
        writer.add_tensor(name, np.asarray(values, np.float32))
        done.append(f"{name} of {len(values)}")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return f"{architecture}: {', '.join(done)}"

"""The kit's numbers, and what a port's numbers are called beside them. Needs numpy alone.

A port is a module, or an object, with any of these functions; `layer_type` and `length` are given where a function
takes them. Whatever raises NotImplementedError is not offered by the port.

    inv_freq(config, layer_type, length)              radians per position, one number for each rotated pair
    magnitude(config, layer_type, length)             the number that cos and sin are multiplied by
    softmax_scale(config, layer_type, length)         the number that scores are multiplied by
    cos_sin(config, positions, layer_type, length)    (cos, sin), each positions x pairs, with the magnitude; a position
                                                      is a number, or three of them under M-RoPE
    table(config, layer_type, length)                 positions that cos_sin has angles for; missing: as many as asked
    rotate(config, vector, position, layer_type, length)    the vector of a head, rotated
    logits(folder, rows, chunks)                      of the last token of each row of token ids; rows of unequal length
                                                      are padded on the left and masked; with chunks, the ids are read
                                                      in pieces of these sizes with one cache
    version()                                         what was run
"""

from __future__ import annotations

import inspect
import json
import shutil
import string
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ORIGINAL = 64
"""The original length of the tiny models, in tokens."""
READ = ("1x", "beyond", "growing cache", "chunks", "left padding")
"""How the tiny models are read."""
CHECKS = ("inv_freq", "magnitude", "softmax_scale", "cos_sin", "on_axes", "rotated")
Json = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """One check of one row or model; `error`: what differs and the likely mistake; "": nothing; None: not offered."""

    case: str
    layer_type: str | None
    length: int | None
    check: str
    error: str | None


@cache
def about() -> Json:
    """Version, licence and tolerances."""
    return read(HERE / "kit.json")


def read(path: Path) -> Json:
    """A JSON file."""
    content: Json = json.loads(path.read_text(encoding="utf-8"))
    return content


def cases(names: list[str] | None = None) -> Iterator[tuple[str, Json]]:
    """The configurations by name."""
    for path in sorted((HERE / "configurations").glob("*.json")):
        if not names or path.stem in names:
            yield path.stem, read(path)


def vector(count: int) -> list[float]:
    """What is rotated."""
    return [((7 * i) % 11 - 5) / 4 for i in range(count)]


def call(function: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """Call a function with those of the named arguments that it takes."""
    taken = inspect.signature(function).parameters
    every = any(each.kind == each.VAR_KEYWORD for each in taken.values())
    return function(*given, **{key: value for key, value in more.items() if every or key in taken})


def check_tables(port: Any, dtype: str = "float32", names: list[str] | None = None) -> Iterator[Outcome]:
    """Every configuration against what a port computes."""
    allowed = about()["tolerances"][dtype]
    for name, entry in cases(names):
        for row in entry["rows"]:
            for check in CHECKS:
                try:
                    with np.errstate(all="ignore"):  # a wrong number may be infinite
                        error: str | None = _COMPARED[check](port, entry, row, allowed)
                except NotImplementedError:
                    error = None
                except Exception as raised:
                    error = f"{type(raised).__name__}: {str(raised)[:200]}"
                yield Outcome(name, row["layer_type"], row["length"], check, error)


def _asked(port: Any, name: str, entry: Json, row: Json, *more: Any) -> Any:
    function = getattr(port, name, None)
    if function is None:
        raise NotImplementedError
    config = json.loads(json.dumps(entry["config"]))
    return call(function, config, *more, layer_type=row["layer_type"], length=row["length"])


def _named(row: Json, key: str, got: Any, tolerance: float) -> str:
    """The mistakes that give these numbers, in words; first those that change nothing else."""
    known = sorted((each for each in row["mistakes"] if key in each), key=len)
    near = [each["name"] for each in known if np.allclose(got, each[key], rtol=max(tolerance, 1e-8), atol=0)]
    return as_with(near)


def as_with(names: list[str]) -> str:
    """Likely mistakes, the first three."""
    return f"; as with: {' or '.join(names[:3])}" if names else ""


def _compare_inv_freq(port: Any, entry: Json, row: Json, allowed: Json) -> str:
    got, right = np.array(_asked(port, "inv_freq", entry, row), np.float64), np.array(row["inv_freq"])
    if got.shape != right.shape:
        whole = 2 * got.size == row["rotated"]["width"]
        return f"{got.size} pairs rotate instead of {right.size}" + ("; as with: a partial rotation ignored" * whole)
    off = np.abs(got - right) / np.where(right > 0, right, 1.0)
    if (off <= allowed["inv_freq"]).all():
        return ""
    worst = int(np.where(np.isnan(off), np.inf, off).argmax())
    text = f"{int((~(off <= allowed['inv_freq'])).sum())} of {right.size} frequencies differ, the most that of pair "
    text += f"{worst}: {got[worst]:.6g} instead of {right[worst]:.6g}"
    return text + _named(row, "inv_freq", got[row["pairs"]], allowed["inv_freq"])


def _compare_number(key: str) -> Callable[[Any, Json, Json, Json], str]:
    def compare(port: Any, entry: Json, row: Json, allowed: Json) -> str:
        got, right = float(_asked(port, key, entry, row)), row[key]
        if abs(got - right) <= allowed["magnitude"] * right:
            return ""
        return f"{got:.7g} instead of {right:.7g}" + _named(row, key, got, allowed["magnitude"])

    return compare


def _compare_cos_sin(port: Any, entry: Json, row: Json, allowed: Json) -> str:
    return _compare_angles(port, entry, row, allowed, row, [[at] * len(row["pairs"]) for at in row["positions"]])


def _compare_on_axes(port: Any, entry: Json, row: Json, allowed: Json) -> str:
    if "axes" not in row:
        raise NotImplementedError
    axes = [row["axes"][i] for i in row["pairs"]]
    at = [[position[axis] for axis in axes] for position in row["on_axes"]["positions"]]
    return _compare_angles(port, entry, row, allowed, row["on_axes"], at)


def _compare_angles(port: Any, entry: Json, row: Json, allowed: Json, table: Json, at: list[list[int]]) -> str:
    limit = _asked(port, "table", entry, row) if hasattr(port, "table") else max(map(max, at)) + 1
    kept = [k for k, each in enumerate(at) if max(each) < limit]
    if not kept:
        raise NotImplementedError
    table = {key: [table[key][k] for k in kept] for key in ("positions", "cos", "sin")}
    at = [at[k] for k in kept]
    cos, sin = _asked(port, "cos_sin", entry, row, table["positions"])
    got = np.stack([np.array(part, np.float64)[:, row["pairs"]] for part in (cos, sin)])
    inv_freq, positions = np.array(row["inv_freq"])[row["pairs"]], np.array(at, np.float64)
    right = row["magnitude"] * np.stack([table["cos"], table["sin"]])
    bound = row["magnitude"] * (allowed["angle"] * positions * inv_freq + allowed["cos_sin"])
    off = np.abs(got - right)
    if (off <= bound).all():
        return ""
    first = int((~(off <= bound)).any((0, 2)).argmax())
    text = f"cos and sin differ by {off[:, first].max():.2g} at position {table['positions'][first]}"
    near = [
        name
        for name, angles, magnitude in _wrong_angles(row, positions, inv_freq)
        if (np.abs(got - magnitude * np.stack([np.cos(angles), np.sin(angles)])) <= 4 * bound).all()
    ]
    return text + as_with(near)


def _wrong_angles(row: Json, positions: Any, inv_freq: Any) -> Iterator[tuple[str, Any, float]]:
    for each in row["mistakes"]:
        if each.keys() & {"inv_freq", "magnitude"}:
            changed = np.array(each.get("inv_freq", inv_freq))
            yield each["name"], positions * changed, each.get("magnitude", row["magnitude"])
    for name, short in (("float16", _float16), ("bfloat16", _bfloat16)):
        yield f"angles in {name}", short(short(positions) * short(inv_freq)), row["magnitude"]
        yield f"positions in {name}", short(positions) * inv_freq, row["magnitude"]
        yield f"frequencies in {name}", positions * short(inv_freq), row["magnitude"]
    if "axes" in row:
        yield "the first axis for every pair", positions[:, :1] * inv_freq, row["magnitude"]


def _float16(values: Any) -> Any:
    return np.asarray(values, np.float16).astype(np.float64)


def _bfloat16(values: Any) -> Any:
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def _compare_rotated(port: Any, entry: Json, row: Json, allowed: Json) -> str:
    given = row["rotated"]
    got = np.array(_asked(port, "rotate", entry, row, vector(given["width"]), given["position"]), np.float64)
    bound = 4 * (allowed["angle"] * given["position"] + allowed["cos_sin"]) * row["magnitude"]
    off = {p: np.abs(got[given[p]["index"]] - given[p]["value"]).max() for p in ("half", "interleaved")}
    own, pairs = entry["pairing"], len(row["inv_freq"])
    if own == "interleaved":  # some reorder what they have rotated, queries and keys alike, which changes no score
        index = [at // 2 + at % 2 * pairs if at < 2 * pairs else at for at in given[own]["index"]]
        off[own] = min(off[own], np.abs(got[index] - given[own]["value"]).max())
    if off[own] <= bound:
        return ""
    other = next(pairing for pairing in off if pairing != own)
    text = f"a vector at position {given['position']} differs by {off[own]:.2g}"
    return text + as_with([f"{other} pairing in place of {own}"] if off[other] <= bound else [])


_COMPARED: dict[str, Callable[[Any, Json, Json, Json], str]] = {
    "inv_freq": _compare_inv_freq,
    "magnitude": _compare_number("magnitude"),
    "softmax_scale": _compare_number("softmax_scale"),
    "cos_sin": _compare_cos_sin,
    "on_axes": _compare_on_axes,
    "rotated": _compare_rotated,
}


# --- tiny models ------------------------------------------------------------------------------------------------------


def models(names: list[str] | None = None) -> Iterator[tuple[str, Json]]:
    """The tiny models by name."""
    for path in sorted((HERE / "models").glob("*.json")):
        if not names or path.stem in names:
            yield path.stem, read(path)


def write_model(name: str, folder: Path) -> Path:
    """A folder with a tiny model, as programs load it."""
    entry = read(HERE / "models" / f"{name}.json")
    made = folder / name
    made.mkdir(parents=True, exist_ok=True)
    words = ["<pad>", "<s>", "</s>", *string.ascii_letters, *string.digits][: entry["config"]["vocab_size"]]
    vocabulary = {word: i for i, word in enumerate(words)}
    steps = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    tokenizer = {  # llama.cpp's converter takes it for that of a Llama
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True, "unk_token": "<pad>"},
    }
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    for file, content in (
        ("config.json", entry["config"]),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | special),
    ):
        (made / file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(HERE / "models" / entry["weights"], made / "model.safetensors")
    return made


def allowed_difference(entry: Json, dtype: str) -> float:
    """The root mean square difference of logits that a dtype explains."""
    rounding: float = (
        3 * entry["rounding"][dtype] if dtype in entry["rounding"] else about()["tolerances"][dtype]["logits"]
    )
    return rounding * float(entry["std"])


def check_models(port: Any, dtype: str = "float32", names: list[str] | None = None) -> Iterator[Outcome]:
    """Every tiny model, read in every way."""
    if not hasattr(port, "logits"):
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, entry in models(names):
            made = write_model(name, Path(folder))
            for check in READ:
                try:
                    error: str | None = _compare_read(port, entry, made, check, dtype)
                except NotImplementedError:
                    error = None
                except Exception as raised:
                    error = f"{type(raised).__name__}: {str(raised)[:200]}"
                yield Outcome(name, None, None, check, error)


def _compare_read(port: Any, entry: Json, folder: Path, check: str, dtype: str) -> str:
    ids, right = entry["ids"], dict(zip(entry["positions"], np.array(entry["logits"]), strict=True))
    last = entry["positions"][-1]
    plan: list[tuple[list[list[int]], list[int] | None]] = {
        "1x": [([ids[:at]], None) for at in right if at <= ORIGINAL],
        "beyond": [([ids[:at]], None) for at in right if at > ORIGINAL],
        "growing cache": [([ids[:128]], [ORIGINAL] + [1] * ORIGINAL)],
        "chunks": [([ids[:last]], [100, 92, last - 192])],
        "left padding": [([ids[:last], ids[:ORIGINAL]], None)],
    }[check]
    rows = [row for asked, _ in plan for row in asked]
    given = [call(port.logits, folder, asked, chunks) for asked, chunks in plan]
    got = np.concatenate(
        [np.array(each, np.float64).reshape(len(asked), -1) for each, (asked, _) in zip(given, plan, strict=True)]
    )
    expected = np.stack([right[len(row)] for row in rows])
    off = np.sqrt(((got - expected) ** 2).mean(-1))
    if (off <= allowed_difference(entry, dtype)).all():
        return ""
    worst = int(np.where(np.isnan(off), np.inf, off).argmax())
    text = f"the logits after {len(rows[worst])} tokens differ by {off[worst] / entry['std']:.2g} standard deviations"
    if check not in ("1x", "beyond"):
        return text
    scores = got - np.log(np.exp(got - got.max(-1, keepdims=True)).sum(-1, keepdims=True)) - got.max(-1, keepdims=True)
    found = {len(row): score[ids[len(row)]] for row, score in zip(rows, scores, strict=True)}
    return text + as_with(likely_mistakes(entry, found, dtype, alone=True))


def likely_mistakes(entry: Json, found: dict[int, float], dtype: str, *, alone: bool = False) -> list[str]:
    """The mistakes under which the tokens that follow prefixes have these log-probabilities, by prefix length.

    Args:
        alone: whether each prefix was read by itself.
    """
    places = [entry["positions"].index(at) for at in found]
    values, bound = np.array(list(found.values())), 4 * allowed_difference(entry, dtype)
    known = {
        each["name"]: each.get("alone", each["logprobs"]) if alone else each["logprobs"] for each in entry["mistakes"]
    }
    near = {name: np.array(logprobs)[places] - values for name, logprobs in known.items()}
    return [name for name, off in near.items() if np.sqrt((off**2).mean()) <= bound]

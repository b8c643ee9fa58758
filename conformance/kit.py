"""Comparison of a port's numbers with those of this kit. It needs only numpy.

A port is a module or an object with any of these functions. `layer_type` and `length` are passed to functions that take
them. A function that raises NotImplementedError counts as missing.

    inv_freq(config, layer_type, length)              radians per position, one number for each rotated pair
    magnitude(config, layer_type, length)             the factor of cos and sin
    softmax_scale(config, layer_type, length)         the factor of scores
    cos_sin(config, positions, layer_type, length)    (cos, sin), each positions x pairs, with the magnitude; a position
                                                      is a number, or three numbers under M-RoPE
    table(config, layer_type, length)                 number of positions that cos_sin has angles for; if missing, it
                                                      has angles for every position
    rotate(config, vector, position, layer_type, length)    the vector of a head, rotated
    logits(folder, rows, chunks)                      logits of the last token of each row of token ids; rows of unequal
                                                      length are padded on the left and masked; with chunks, the ids are
                                                      read in pieces of these sizes with one cache
    version()                                         the name and version of the program
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
"""The ways in which the tiny models are read."""
CHECKS = ("inv_freq", "magnitude", "softmax_scale", "cos_sin", "on_axes", "rotated")
Json = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check."""

    case: str  # the configuration or tiny model
    layer_type: str | None
    length: int | None
    check: str
    error: str | None  # the difference and the likely mistake; empty: none; None: the port lacks the function


@cache
def about() -> Json:
    """Return the kit's version, licence and tolerances."""
    return read(HERE / "kit.json")


def read(path: Path) -> Json:
    """Return the content of a JSON file."""
    content: Json = json.loads(path.read_text(encoding="utf-8"))
    return content


def cases(names: list[str] | None = None) -> Iterator[tuple[str, Json]]:
    """Yield configurations with their names; all of them if no names are given."""
    for path in sorted((HERE / "configurations").glob("*.json")):
        if not names or path.stem in names:
            yield path.stem, read(path)


def vector(count: int) -> list[float]:
    """Return the vector that `rotate` is called with."""
    return [((7 * i) % 11 - 5) / 4 for i in range(count)]


def call(function: Callable[..., Any], *args: Any, **optional: Any) -> Any:
    """Call a function with the positional arguments, and with the named ones that it takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return function(*args, **{name: value for name, value in optional.items() if takes_all or name in parameters})


def check_tables(port: Any, dtype: str = "float32", names: list[str] | None = None) -> Iterator[Outcome]:
    """Compare a port with every configuration, or with the named ones."""
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


def _port_value(port: Any, name: str, entry: Json, row: Json, *args: Any) -> Any:
    """Return the value of a port's function for a row of a configuration; NotImplementedError where it has none."""
    function = getattr(port, name, None)
    if function is None:
        raise NotImplementedError
    config = json.loads(json.dumps(entry["config"]))  # a port may change it
    return call(function, config, *args, layer_type=row["layer_type"], length=row["length"])


def _matching_mistakes(row: Json, key: str, value: Any, tolerance: float) -> str:
    """Return a clause with the mistakes that give this value, those that change nothing else first."""
    mistakes = sorted((mistake for mistake in row["mistakes"] if key in mistake), key=len)
    matching = [
        mistake["name"] for mistake in mistakes if np.allclose(value, mistake[key], rtol=max(tolerance, 1e-8), atol=0)
    ]
    return as_with(matching)


def as_with(names: list[str]) -> str:
    """Return a clause with the first three of the likely mistakes, or an empty string."""
    return f"; as with: {' or '.join(names[:3])}" if names else ""


def _compare_inv_freq(port: Any, entry: Json, row: Json, allowed: Json) -> str:
    computed, right = np.array(_port_value(port, "inv_freq", entry, row), np.float64), np.array(row["inv_freq"])
    if computed.shape != right.shape:
        text = f"{computed.size} pairs rotate instead of {right.size}"
        whole_head = 2 * computed.size == row["rotated"]["width"]
        return text + as_with(["a partial rotation ignored"] if whole_head else [])
    error = np.abs(computed - right) / np.where(right > 0, right, 1.0)
    if (error <= allowed["inv_freq"]).all():
        return ""
    worst = int(np.where(np.isnan(error), np.inf, error).argmax())
    text = f"{int((~(error <= allowed['inv_freq'])).sum())} of {right.size} frequencies differ, the most that of pair "
    text += f"{worst}: {computed[worst]:.6g} instead of {right[worst]:.6g}"
    return text + _matching_mistakes(row, "inv_freq", computed[row["pairs"]], allowed["inv_freq"])


def _compare_number(key: str) -> Callable[[Any, Json, Json, Json], str]:
    def compare(port: Any, entry: Json, row: Json, allowed: Json) -> str:
        computed, right = float(_port_value(port, key, entry, row)), row[key]
        if abs(computed - right) <= allowed["magnitude"] * right:
            return ""
        mistakes = _matching_mistakes(row, key, computed, allowed["magnitude"])
        return f"{computed:.7g} instead of {right:.7g}{mistakes}"

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
    """Compare cos and sin with those of a table, at positions (positions, pairs) that the port has angles for."""
    limit = _port_value(port, "table", entry, row) if hasattr(port, "table") else max(map(max, at)) + 1
    kept = [index for index, positions in enumerate(at) if max(positions) < limit]
    if not kept:
        raise NotImplementedError
    table = {key: [table[key][index] for index in kept] for key in ("positions", "cos", "sin")}
    at = [at[index] for index in kept]
    cos, sin = _port_value(port, "cos_sin", entry, row, table["positions"])
    computed = np.stack([np.array(part, np.float64)[:, row["pairs"]] for part in (cos, sin)])
    inv_freq, positions = np.array(row["inv_freq"])[row["pairs"]], np.array(at, np.float64)
    right = row["magnitude"] * np.stack([table["cos"], table["sin"]])
    bound = row["magnitude"] * (allowed["angle"] * positions * inv_freq + allowed["cos_sin"])
    error = np.abs(computed - right)
    if (error <= bound).all():
        return ""
    first = int((~(error <= bound)).any((0, 2)).argmax())
    text = f"cos and sin differ by {error[:, first].max():.2g} at position {table['positions'][first]}"
    matching = [
        name
        for name, angles, magnitude in _wrong_angles(row, positions, inv_freq)
        if (np.abs(computed - magnitude * np.stack([np.cos(angles), np.sin(angles)])) <= 4 * bound).all()
    ]
    return text + as_with(matching)


def _wrong_angles(row: Json, positions: Any, inv_freq: Any) -> Iterator[tuple[str, Any, float]]:
    """Yield mistakes by name, with their angles and their magnitude."""
    for mistake in row["mistakes"]:
        if mistake.keys() & {"inv_freq", "magnitude"}:
            wrong_inv_freq = np.array(mistake.get("inv_freq", inv_freq))
            yield mistake["name"], positions * wrong_inv_freq, mistake.get("magnitude", row["magnitude"])
    for name, rounded in (("float16", _float16), ("bfloat16", _bfloat16)):
        yield f"angles in {name}", rounded(rounded(positions) * rounded(inv_freq)), row["magnitude"]
        yield f"positions in {name}", rounded(positions) * inv_freq, row["magnitude"]
        yield f"frequencies in {name}", positions * rounded(inv_freq), row["magnitude"]
    if "axes" in row:
        yield "the first axis for every pair", positions[:, :1] * inv_freq, row["magnitude"]


def _float16(values: Any) -> Any:
    return np.asarray(values, np.float16).astype(np.float64)


def _bfloat16(values: Any) -> Any:
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def _compare_rotated(port: Any, entry: Json, row: Json, allowed: Json) -> str:
    right = row["rotated"]
    computed = np.array(_port_value(port, "rotate", entry, row, vector(right["width"]), right["position"]), np.float64)
    bound = 4 * (allowed["angle"] * right["position"] + allowed["cos_sin"]) * row["magnitude"]
    errors = {
        pairing: np.abs(computed[right[pairing]["index"]] - right[pairing]["value"]).max()
        for pairing in ("half", "interleaved")
    }
    own, pairs = entry["pairing"], len(row["inv_freq"])
    if own == "interleaved":  # some programs reorder rotated queries and keys alike, which changes no score
        index = [at // 2 + at % 2 * pairs if at < 2 * pairs else at for at in right[own]["index"]]
        errors[own] = min(errors[own], np.abs(computed[index] - right[own]["value"]).max())
    if errors[own] <= bound:
        return ""
    other = next(pairing for pairing in errors if pairing != own)
    text = f"a vector at position {right['position']} differs by {errors[own]:.2g}"
    return text + as_with([f"{other} pairing in place of {own}"] if errors[other] <= bound else [])


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
    """Yield the tiny models with their names; all of them if no names are given."""
    for path in sorted((HERE / "models").glob("*.json")):
        if not names or path.stem in names:
            yield path.stem, read(path)


def write_model(name: str, folder: Path) -> Path:
    """Write the folder of a tiny model, as programs load it, and return its path."""
    entry = read(HERE / "models" / f"{name}.json")
    model_folder = folder / name
    model_folder.mkdir(parents=True, exist_ok=True)
    words = ["<pad>", "<s>", "</s>", *string.ascii_letters, *string.digits][: entry["config"]["vocab_size"]]
    vocabulary = {word: i for i, word in enumerate(words)}
    steps = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    tokenizer = {  # llama.cpp's converter takes it for a Llama's
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
        (model_folder / file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(HERE / "models" / entry["weights"], model_folder / "model.safetensors")
    return model_folder


def allowed_difference(entry: Json, dtype: str) -> float:
    """Return the root mean square difference of logits that a dtype explains."""
    deviation = float(entry["std"])
    if dtype in entry["rounding"]:
        return 3 * float(entry["rounding"][dtype]) * deviation
    return float(about()["tolerances"][dtype]["logits"]) * deviation


def check_models(port: Any, dtype: str = "float32", names: list[str] | None = None) -> Iterator[Outcome]:
    """Compare a port's logits of every tiny model, or of the named ones, read in every way."""
    if not hasattr(port, "logits"):
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, entry in models(names):
            model_folder = write_model(name, Path(folder))
            for check in READ:
                try:
                    error: str | None = _compare_read(port, entry, model_folder, check, dtype)
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
    rows, computed_rows = [], []
    for batch, chunks in plan:
        rows += batch
        result = call(port.logits, folder, batch, chunks)
        computed_rows.append(np.array(result, np.float64).reshape(len(batch), -1))
    computed = np.concatenate(computed_rows)
    expected = np.stack([right[len(row)] for row in rows])
    error = np.sqrt(((computed - expected) ** 2).mean(-1))
    if (error <= allowed_difference(entry, dtype)).all():
        return ""
    worst = int(np.where(np.isnan(error), np.inf, error).argmax())
    text = f"the logits after {len(rows[worst])} tokens differ by {error[worst] / entry['std']:.2g} standard deviations"
    if check not in ("1x", "beyond"):
        return text
    largest = computed.max(-1, keepdims=True)
    scores = computed - np.log(np.exp(computed - largest).sum(-1, keepdims=True)) - largest
    logprobs = {len(row): score[ids[len(row)]] for row, score in zip(rows, scores, strict=True)}
    return text + as_with(likely_mistakes(entry, logprobs, dtype, alone=True))


def likely_mistakes(entry: Json, logprobs: dict[int, float], dtype: str, *, alone: bool = False) -> list[str]:
    """Return the mistakes under which the tokens that follow prefixes have these log-probabilities.

    Args:
        entry: the tiny model.
        logprobs: the log-probability of the token after each prefix, by the prefix's length.
        dtype: the dtype of the computation.
        alone: whether each prefix was read by itself.
    """
    places = [entry["positions"].index(length) for length in logprobs]
    values, bound = np.array(list(logprobs.values())), 4 * allowed_difference(entry, dtype)
    names = []
    for mistake in entry["mistakes"]:
        of_mistake = mistake.get("alone", mistake["logprobs"]) if alone else mistake["logprobs"]
        error = np.array(of_mistake)[places] - values
        if np.sqrt((error**2).mean()) <= bound:
            names.append(mistake["name"])
    return names

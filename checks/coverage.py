"""Coverage of the installed transformers: patch, and read, a tiny model of every language model class.

    python -m checks.coverage [--only llama,qwen3] [--again]
    python -m checks.coverage --new     # in some minutes, what the classes of a new release lack
    python -m checks.coverage --methods cope,nope    # adds these methods to the record, and measures nothing else

Every method is patched into every class, and `rope-ext extend` must announce what `patch` then takes or refuses. A
class that has `generate` runs two turns of a chat through one cache, with text and with images. Each class gets a
process of its own with a time limit. What is measured goes to build/coverage/log.jsonl as it comes, and a run goes on
from there; the whole of it to docs/results/coverage.json. The exit status is 1 where a model was not built, or a patch
or a measurement did something else than work or refuse with a reason.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

import rope_ext_hf as rope
from checks.losses import EQUAL, LONG, RESULT, WrongError, measured, require
from rope_ext_hf.errors import LengthError, RopeExtError, one_line
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.rows.row_probe import pairing_of
from rope_ext_hf.tools.serving.config_model import ConfigModel
from tests.support.every_model import Entry, build, data, entries, holds_rope, inputs
from tests.support.method_examples import example_method
from tests.support.two_turns import Opening, logits_of_whole_rows, opening, two_turns

ROOT = Path(__file__).parent.parent
LOG = ROOT / "build" / "coverage" / "log.jsonl"
LIMIT = 240  # seconds for one class
SHORT, DECODED = 24, 4
COLUMNS = ("static", "length-dependent", "remapping", "generate", "conversion", "measured")
FIRST, LONG_FIRST, SECOND = 30, 90, 9
"""Tokens of the first prompt of a chat, and of the second; with a long first one it goes beyond the context length."""
BECAUSE = {
    "full-attention layers of this": "no layer that attends to everything rotates: only sliding-window layers do",
    "embedding that can be replaced": "cos and sin are no module of their own: built into the attention, or none",
    "temperature has nothing to change": "its attention has a factor of its own, which grows with the position",
    "rotates values, too": "its attention rotates values, too, so that the attention factor must be given",
    "trains one set of frequencies": "several sets of frequencies",
    "keys for 5 tokens": "its attention reads other keys than those of its tokens",
    "arranges them in another way": "the two columns of a pair are not rotated by the pair's own frequency",
    "are not what its config describes": "its frequencies are not those that its config describes",
    "does not go through transformers' attention interface": "attention outside transformers' attention interface",
    "attention that is not causal": "attention is not causal",
    "an index with rotated keys": "an index of its own chooses keys",
    "index with keys of its own": "keys are changed after the rotation, or an index has keys of its own",
    "a mask of its own": "attention adds a mask of its own",
    "both rotates and attends to everything": "every layer that rotates has a sliding window",
    "for all layers of one decoder": "several decoders, each with a rotary embedding",
    "keys than a remapping method can undo": "keys are changed after the rotation",
    "does more with its queries and keys": "keys are changed after the rotation",
    "it compresses them": "keys are compressed",
    "at the positions": "keys are compressed",
    "beside the": "it rotates at positions of something else than its tokens (compressed keys, a canvas)",
    "by one table of angles": "its angles are one table for all rows",
    "neither the family table nor a probe": "neither the family table nor a probe knows its rows",
    "belongs to an attention module": "its vision tower has weights that the family table does not list",
    "does not run on four tokens": "its decoder does not run alone",
    "no max_position_embeddings": "its config has no length",
    "one method needs one rotary embedding": "several rotary embeddings in layers that attend to everything",
    "a number for each of its": "it multiplies its frequencies by something learned",
    "sees the tokens": "it sees the tokens that it is to predict",
    "object has no attribute 'logits'": "it has no head",
    "token ids alone": "it does not run on token ids alone",
    "no rotary position embedding": "its rotary embedding cannot be replaced",
    "does more with its angles": "its angles are arranged in a way of their own",
    "DynamicIndexedLayer": "an index chooses the keys that a query sees",
    "layers of the class": "its cache holds something else than keys, values and states of fixed size",
    "mask itself": "its decoder works with its attention mask itself",
    "off by": "its decoder and head apart give other logits",
    "position_bias": "its attention adds a bias to the scores",
    "cache of its own": "it takes its own cache alone",
    "another base cannot be put underneath": "it has a scaling of its own",
    "it has no generate": "it has no `generate`",
    "more than token ids": "it reads more than token ids",
    "stops without a patch": "its `generate` stops on this chat without a patch, too",
}
"""What a page says of a refusal, by words of its message; the message itself where none of them is in it."""
OTHER_PAIRING = {"half": "interleaved", "interleaved": "half"}


@torch.no_grad()
def run(model: Any, entry: Entry, length: int = SHORT) -> Tensor:
    """The logits of a model, or its hidden states where it has none."""
    torch.manual_seed(0)  # diffusion begins with noise
    out = model(**inputs(entry, length), return_dict=True)
    names = ("logits", "language_model_outputs", "last_hidden_state")
    found = next((out[name] for name in names if isinstance(out.get(name), Tensor)), None)
    result: Tensor = next(iter(out.values())) if found is None else found
    return result


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, in standard deviations of the output where those are above 1."""
    return float((one - other).abs().max() / other.std().clamp(min=1))


def snapshot(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and config, to be compared with those after a patch and its undoing."""
    return {name: value.clone() for name, value in model.state_dict().items()}, copy.deepcopy(model.config.to_dict())


def require_unchanged(model: Any, before: tuple[dict[str, Tensor], dict[str, Any]], when: str) -> None:
    weights, config = snapshot(model)
    require(list(weights) == list(before[0]), f"the state dict has other keys {when}")
    require(all(torch.equal(weights[name], value) for name, value in before[0].items()), f"other weights {when}")
    require(json.dumps(config, default=str) == json.dumps(before[1], default=str), f"another config {when}")


def static(model: Any, entry: Entry) -> str:
    """Factor 1 changes nothing, factor 4 does, a saved model loads plainly or stops, and unpatching is exact."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # which writes its class and dtype into its config
        stock = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    reloads = difference(run(stock, entry), run(model, entry)) < EQUAL  # not every class does, in transformers 5.23
    before, as_loaded = snapshot(model), run(model, entry)
    params = data()["params"].get(entry.model_type, {})
    rope.patch(model, "yarn", factor=1, **params)
    require(difference(run(model, entry), as_loaded) < EQUAL, "factor 1 changes the output")
    rope.patch(model, "yarn", factor=4, **params)
    patched = run(model, entry)
    require(list(model.state_dict()) == list(before[0]), "a patched model has other keys in its state dict")
    require(difference(patched, as_loaded) > 1e-5, "factor 4 changes nothing")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        how = _load_plainly(model, entry, folder, patched, reloads)
    rope.unpatch(model)
    require_unchanged(model, before, "after unpatching")
    require(torch.equal(run(model, entry), as_loaded), "another output after unpatching")
    return how


def _load_plainly(model: Any, entry: Entry, folder: str, expected: Tensor, reloads: bool) -> str:
    try:
        loaded = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:  # of any kind, as long as it names this package
        require("rope_ext_hf" in str(error), f"plain loading fails: {one_line(error)}")
        loaded = rope.from_pretrained(folder, dtype=torch.float32).eval()
        how = "plain loading stops, naming rope_ext_hf"
    else:
        how = "loads plainly"
    if not reloads:
        loaded.load_state_dict(model.state_dict())
    far = difference(run(loaded, entry), expected)
    require(far < EQUAL, f"a saved model is another one: {how}, logits off by {far:.1g}")
    return how


def length_dependent(model: Any, entry: Entry) -> str:
    """Short inputs are as loaded, long ones as with their length fixed; decoding goes on beyond a cached prompt."""
    before, as_loaded = snapshot(model), run(model, entry)
    rope.patch(model, "dynamic-ntk")
    require(difference(run(model, entry), as_loaded) < EQUAL, "a short input is not as loaded")
    whole = run(model, entry, LONG)
    with rope.fixed_length(model, LONG + data()["first_position"].get(entry.model_type, 0)):
        require(difference(run(model, entry, LONG), whole) < EQUAL, "the length of an input is not its own")
    _decode(model, entry)
    rope.unpatch(model)
    require_unchanged(model, before, "after unpatching")
    return ""


@torch.no_grad()
def _decode(model: Any, entry: Entry) -> Tensor | None:
    """The last outputs of a long input read onto a cache; None for a model without a cache."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None  # what a class of several axes remembers of the rows of its last chat
    given = inputs(entry, LONG)
    if set(given) != {"input_ids"} or not getattr(model.config.get_text_config(), "use_cache", False):
        return None
    ids = given["input_ids"]
    cache = model(input_ids=ids[:, :-DECODED], use_cache=True).get("past_key_values")
    if cache is None:
        return None
    steps = [
        model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)[0]
        for at in range(LONG - DECODED, LONG)
    ]
    return torch.cat(steps, dim=1)


def _takes_long(model: Any, entry: Entry) -> bool:
    """Return whether a class reads a long input; in transformers 5.24 Dory's loops do not, beyond its window."""
    try:
        run(model, entry, LONG)
    except (IndexError, RuntimeError):
        return False
    return True


def _decodes_alike(model: Any, entry: Entry) -> bool:
    """Return whether decoding onto a cache equals one forward; some classes do not even without a patch."""
    try:
        steps = _decode(model, entry)
        return steps is not None and difference(steps, run(model, entry, LONG)[:, -DECODED:]) < EQUAL
    except (IndexError, RuntimeError):  # a table of positions that ends; a step that the class does not take
        return False


def remapping(model: Any, entry: Entry) -> str:
    """An input inside the window is as loaded, a longer one is not, and decoding onto a cache equals one forward.

    Where the rule follows the length of a row, an input up to the context length is as loaded to the bit.
    """
    before, as_loaded, decodes = snapshot(model), run(model, entry), _decodes_alike(model, entry)
    rope.patch(model, "rerope", window=32, temperature="none")
    far = difference(run(model, entry), as_loaded)
    require(far < EQUAL, f"an input inside the window is not as loaded: off by {far:.1g}")
    whole = run(model, entry, LONG)
    require(not decodes or _decodes_alike(model, entry), "decoding is not one forward")
    rope.unpatch(model)
    require(difference(run(model, entry, LONG), whole) > 1e-5, "an input beyond the window is as loaded")
    require_unchanged(model, before, "after unpatching")
    require(difference(run(model, entry), as_loaded) == 0, "another output after unpatching")
    rope.patch(model, "jet-long", max_distance=(SHORT + LONG) // 2)
    require(torch.equal(run(model, entry), as_loaded), "a row up to the context length is not as loaded to the bit")
    require(difference(run(model, entry, LONG), whole) > 1e-5, "a longer row is as loaded")
    rope.unpatch(model)
    return ""


def generate(model: Any, entry: Entry) -> str:
    """Two turns of a chat through one cache are what they must be under a method of each kind, see `_chats`.

    They are run with a mask and with padding on the left, and once more with an image in each row where
    every_model.toml has one. The result says with which of these, and whether a chat equals forwards without a cache.
    """
    said, text_alike = [], True
    for image in (False, True):
        first, alike, stops = _unpatched_chat(model, entry, image)
        # A class that chooses keys by an index may agree with itself by chance, in a single row.
        text_alike = alike = alike and text_alike
        if first is None:
            if not image:
                return f"refused: {stops}"
            break
        _chats(model, entry, first, alike)
        of, padding = "image" if image else "text", bool((first.mask == 0).any())
        said += [of, *(f"{of} {word}" for word, holds in (("padding", padding), ("whole", alike)) if holds)]
    return ", ".join(said)


def _unpatched_chat(model: Any, entry: Entry, image: bool) -> tuple[Opening | None, bool, str]:
    """Return a first prompt on which an unpatched class generates, and whether a chat equals forwards without a cache.

    Two rows with padding come first; one row is taken where the class reads padding as something else. The prompt is
    None where there is none, and the third value the error of the class then.
    """
    if not (hasattr(model, "generate") and model.can_generate()):
        return None, False, "it has no generate"
    runs: list[Opening] = []
    stops = "it reads more than token ids"
    for rows in (2, 1):
        if (first := opening(entry, FIRST, rows=rows, image=image)) is None:
            break
        try:
            two_turns(model, first, SECOND)
        except Exception as error:  # of any kind, of the class itself
            stops = f"its generate stops without a patch, too: {one_line(error)}"
            continue
        if _one_forward(model, first):
            return first, True, ""
        runs.append(first)
    return (runs[0] if runs else None), False, stops


def _one_forward(model: Any, first: Opening) -> bool:
    """Return whether the logits of a chat equal those of forwards over the same tokens without cache and padding."""
    chat = two_turns(model, first, SECOND)
    try:
        whole = logits_of_whole_rows(model, chat)
    except (IndexError, RuntimeError):  # a class that does not read this length at once
        return False
    return difference(chat.logits, whole) < EQUAL


def _chats(model: Any, entry: Entry, first: Opening, alike: bool) -> None:
    """Hold the chats of a patched model to transformers with the same scaling, and to forwards without a cache.

    `alike`: the unpatched class gives the same in a chat as without a cache. Kinds of methods that the class refuses
    are left out, and its refusal is raised if it takes none of them. A method that needs one position per token must
    refuse those of an image on several axes.
    """
    length = LONG + data()["first_position"].get(entry.model_type, 0)
    long = opening(entry, LONG_FIRST, rows=len(first.ids), image=bool(first.beside))
    assert long is not None
    long_alike = alike and _takes_long(model, entry) and _one_forward(model, long)
    kinds: dict[str, dict[str, Any]] = {
        "yarn": {"factor": 4, **data()["params"].get(entry.model_type, {})},
        "dynamic-ntk": {},
        "rerope": {"window": 16, "temperature": "none"},
    }
    refusals = 0
    for method, params in kinds.items():
        try:
            rope.patch(model, method, **params)
        except RopeExtError:
            refusals += 1
            if refusals == len(kinds):
                raise
            continue
        if method == "yarn":
            _as_transformers(model, first)
        try:
            require(not alike or _one_forward(model, first), f"a chat is not one forward under {method}")
            if long_alike:
                require(bool(two_turns(model, long, SECOND).logits.isfinite().all()), f"no numbers under {method}")
        except LengthError as error:
            axes_differ = bool(first.beside) and "from axis to axis" in str(error)
            require(axes_differ or _refuses_cache(model, entry), f"a chat is refused: {one_line(error)}")
        if long_alike and not (first.beside and method == "rerope"):
            with rope.fixed_length(model, length):
                require(_one_forward(model, long), f"a long chat is not one forward under {method}")
        rope.unpatch(model)


def _refuses_cache(model: Any, entry: Entry) -> bool:
    """Return whether a patched model refuses to go on from any cache, because of what its class keeps there."""
    try:
        _decode(model, entry)
    except LengthError:
        return True
    return False


def _as_transformers(model: Any, first: Opening) -> None:
    """Check that a chat under a static method equals one by transformers, with the settings that the patch saves."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            stock = type(model).from_pretrained(folder, dtype=torch.float32).eval()
        except Exception as error:  # `static` says more of it
            require("rope_ext_hf" in str(error), f"plain loading fails: {one_line(error)}")
            return
    stock.load_state_dict(model.state_dict())
    far = difference(two_turns(model, first, SECOND).logits, two_turns(stock, first, SECOND).logits)
    require(far < EQUAL, f"a chat is another one in transformers with the same scaling, logits off by {far:.1g}")


def conversion(model: Any, entry: Entry) -> str:
    """Converting changes the weights, and converting back is exact."""
    weights, _ = snapshot(model)
    if (now := pairing_of(model)) is None:
        return f"refused: neither the family table nor a probe knows the rows of {type(model).__name__}"
    rope.convert(model, to=OTHER_PAIRING[now])
    require(any(not torch.equal(value, weights[name]) for name, value in model.state_dict().items()), "no row moved")
    rope.convert(model, to=now)
    for name, value in model.state_dict().items():
        require(torch.equal(value, weights[name]), f"{name} is another one after conversion there and back")
    return ""


def each_method(model: Any, entry: Entry, names: Sequence[str] | None = None) -> dict[str, str]:
    """Return, for each method or each of `names`, why `patch` refuses it; empty if it computes what it should.

    Refused or not, it must be what is announced without the weights. A long input must give the same logits in one
    forward and by decoding onto a cache, under the frequencies of its whole length; and so must a chat of two turns.
    """
    as_loaded, decodes, rotary, opened = run(model, entry), _decodes_alike(model, entry), None, None
    first, chats, _ = _unpatched_chat(model, entry, image=False)
    length = LONG if _takes_long(model, entry) else SHORT
    with suppress(RopeExtError):  # as `patch` will say
        rotary, opened = ModelRope.of_model(model).rotary, _opened(model)
    said: dict[str, str] = {}
    for name, method_class in rope.list_methods().items():
        if names is not None and name not in names:
            continue
        method = example_method(method_class, rotary or Rotary(dim=16, theta=1e4, trained_length=64))
        announced = None if opened is None else _announced(opened, method)
        try:
            rope.patch(model, method)
        except RopeExtError as error:
            known = opened is not None and opened.can_be_tried  # `extend` says that it could not try a method
            require(not known or announced is not None, f"{name} is offered, and refused: {one_line(error)}")
            said[name] = one_line(error, 400)
            continue
        require(announced is None, f"{name} is accepted, and announced to be refused: {announced}")
        said[name] = ""
        with rope.fixed_length(model, LONG + data()["first_position"].get(entry.model_type, 0)):
            require(bool(run(model, entry, length).isfinite().all()), f"{name} gives something else than numbers")
            require(not decodes or _decodes_alike(model, entry), f"decoding is not one forward under {name}")
            require(not (chats and first) or _one_forward(model, first), f"a chat is not one forward under {name}")
        rope.unpatch(model)
        require(torch.equal(run(model, entry), as_loaded), f"another output after unpatching {name}")
    return said


def _opened(model: Any) -> ConfigModel:
    """A model as `extend` opens a folder: without its weights."""

    def without_weights() -> Any:
        with torch.device("meta"):
            return type(model)(model.config)

    return ConfigModel(model.config.get_text_config(), whole=without_weights)


def _announced(opened: ConfigModel, method: RopeMethod) -> RopeExtError | None:
    """The error with which `patch` is to refuse a method, asked for without the weights; None: it is offered."""
    try:
        opened.planned_patch(method)
    except RopeExtError as error:
        return error
    return opened.refusal(method)


CHECKS: Mapping[str, Callable[[Any, Entry], str]] = dict(
    zip(COLUMNS, (static, length_dependent, remapping, generate, conversion, measured), strict=True)
)


def refused(model: Any, entry: Entry) -> str:
    """For a model without a rotary embedding: a patch is an error with that reason, and nothing changes."""
    rope.patch(model, "yarn", factor=4)
    raise WrongError("a model without a rotary embedding was patched")


WITHOUT_ROPE = dict.fromkeys(COLUMNS[:4], refused) | {"conversion": conversion, "measured": measured}


def measure(entry: Entry) -> dict[str, Any]:
    """One row: how a class takes each kind of method.

    A column is {"works": true} or {"works": false, "reason": the refusal}. "methods" has, by method, the reason of a
    refusal, or "" where it is accepted. A row with "error" is a defect.
    """
    started = time.perf_counter()
    row: dict[str, Any] = {"model_type": entry.model_type, "class": entry.name, "kind": entry.kind}
    if (part := data()["measured_as"].get(entry.model_type)) is not None:
        whole = next(each for each in entries() if each.model_type == part)
        return measure(whole) | row | {"measured as": part}
    if (reason := data()["not_measured"].get(entry.model_type)) is not None:
        refusal = {"works": False, "reason": reason}
        return row | {"rope": True} | dict.fromkeys(COLUMNS, refusal) | {"methods": {}, "seconds": 0.0}
    warnings.simplefilter("ignore")
    try:
        model = build(entry)
        row["text"] = model.config.get_text_config().model_type
        row["rope"] = holds_rope(model)
        with suppress(RopeExtError):
            row["rotating"] = rope.describe(model).rotating_layers
        for column, check in (CHECKS if row["rope"] else WITHOUT_ROPE).items():
            try:
                how = check(model, entry)
                works = not how.startswith("refused: ")
                row[column] = {"works": works, "how" if works else "reason": how.removeprefix("refused: ")}
            except RopeExtError as error:
                row[column] = {"works": False, "reason": one_line(error, 400)}
                rope.unpatch(model)
        row["methods"] = each_method(model, entry) if row["rope"] else {}
    except Exception as error:  # of any kind: that is what is measured
        row["error"] = f"{type(error).__name__}: {one_line(error, 600)}"
        row["trace"] = traceback.format_exc(limit=-6)
    return row | {"seconds": round(time.perf_counter() - started, 2)}


def measure_methods(entry: Entry, names: Sequence[str]) -> dict[str, Any]:
    """The part of a row that says how a class takes the methods of these names."""
    warnings.simplefilter("ignore")
    row: dict[str, Any] = {"model_type": entry.model_type, "class": entry.name}
    part = data()["measured_as"].get(entry.model_type)
    if part is not None:
        entry = next(each for each in entries() if each.model_type == part)
    try:
        row["methods"] = each_method(build(entry), entry, names)
    except Exception as error:  # of any kind: that is what is measured
        row["error"] = f"{type(error).__name__}: {one_line(error, 600)}"
    return row


def add_methods(names: Sequence[str]) -> list[dict[str, Any]]:
    """Add the methods of these names to the rows of the record that lack them, and return the rows with a defect."""
    unknown = [name for name in names if name not in rope.list_methods()]
    if unknown:
        raise SystemExit(f"no such method: {', '.join(unknown)}")
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    if record["versions"] != _versions():
        raise SystemExit(f"the record was made with {record['versions']}; measure everything anew")
    by_class = {(entry.model_type, entry.name): entry for entry in entries()}
    wrong = []
    for row in record["rows"]:
        if not row["methods"] or row["methods"].keys() >= set(names):
            continue
        added = measure_apart(by_class[row["model_type"], row["class"]], partial(measure_methods, names=names))
        print(f"{row['model_type']:28} {added.get('error') or added['methods']}", flush=True)
        if "error" in added:
            wrong.append(added)
            continue
        said = row["methods"] | {name: reason and _in_few_words(reason) for name, reason in added["methods"].items()}
        row["methods"] = {name: said[name] for name in rope.list_methods() if name in said}
    _write_record(record["rows"])
    return wrong


def _work(entry: Entry, what: Callable[[Entry], dict[str, Any]], connection: Any) -> None:
    torch.set_num_threads(1)
    connection.send(what(entry))


def measure_apart(entry: Entry, what: Callable[[Entry], dict[str, Any]] = measure) -> dict[str, Any]:
    """`measure`, or another function of an entry, in a process of its own, ended at the time limit."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(entry, what, theirs))
    process.start()
    theirs.close()
    row = None
    if ours.poll(LIMIT):
        with suppress(EOFError):
            row = ours.recv()
    process.kill() if row is None else process.join()
    if row is None:
        row = {"model_type": entry.model_type, "class": entry.name, "kind": entry.kind}
        row |= {"error": f"no result within {LIMIT} seconds, or the process died", "seconds": LIMIT}
    return row


def read_log() -> dict[tuple[str, str], dict[str, Any]]:
    if not LOG.exists():
        return {}
    rows = map(json.loads, LOG.read_text(encoding="utf-8").splitlines())
    return {(row["model_type"], row["class"]): row for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TYPES", help="these model types alone, and nothing is written")
    parser.add_argument("--new", action="store_true", help="classes that are not in the record yet; nothing is written")
    parser.add_argument("--methods", metavar="NAMES", help="add these methods to the record, and measure nothing else")
    parser.add_argument("--again", action="store_true", help="measure again what is in the log")
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if given.methods:
        sys.exit(bool(add_methods(given.methods.split(","))))
    only = set(given.only.split(",")) if given.only else None
    if given.new:
        recorded = {(row["model_type"], row["class"]) for row in json.loads(RESULT.read_text("utf-8"))["rows"]}
        only = {entry.model_type for entry in entries() if (entry.model_type, entry.name) not in recorded}
    chosen = [entry for entry in entries() if only is None or entry.model_type in only]
    if given.again and only is None:
        LOG.unlink(missing_ok=True)
    done = {} if only else read_log()
    LOG.parent.mkdir(parents=True, exist_ok=True)
    measure(next(entry for entry in entries() if entry.model_type == "llama"))  # so that forks have what it imports
    rows = []
    for entry in chosen:
        row = done.get((entry.model_type, entry.name))
        if row is None or ("error" in row):
            row = measure_apart(entry)
            if only is None:
                with LOG.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(row) + "\n")
        print(json.dumps(row, indent=1) if given.only else f"{row['model_type']:28} {_summary(row)}", flush=True)
        for lack in _lacking(row) if given.new else ():
            print(f"{'':28} {lack}")
        rows.append(row)
    wrong = [row for row in rows if "error" in row]
    if only is None and not wrong:
        _write_record([_for_the_record(row) for row in rows])
    print("\n".join(f"{row['model_type']}, {row['class']}: {row['error']}" for row in wrong))
    sys.exit(bool(wrong))


def _versions() -> dict[str, str]:
    return {package: version(package) for package in ("rope-ext-hf", "torch", "transformers")}


def _write_record(rows: Sequence[Mapping[str, Any]]) -> None:
    head = json.dumps({"command": "python -m checks.coverage", "versions": _versions(), "rows": []}, indent=1)
    text = ",\n  ".join(json.dumps(row) for row in rows)
    RESULT.write_text(head.replace('"rows": []', f'"rows": [\n  {text}\n ]') + "\n", encoding="utf-8")


def _for_the_record(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the result: what works, and in a few words why not."""
    kept = {key: value for key, value in row.items() if key not in COLUMNS}
    for column in COLUMNS:
        works, reason = row[column]["works"], row[column].get("reason")
        if works and column == "measured" and (how := row[column]["how"]) != "in chunks":
            reason = how
        kept[column] = {"works": works}
        if works and column == "generate":
            kept[column]["with"] = row[column]["how"].split(", ")
        if reason:
            kept[column]["because"] = _in_few_words(reason)
    kept["methods"] = {name: reason and _in_few_words(reason) for name, reason in row["methods"].items()}
    return kept


def _in_few_words(reason: str) -> str:
    return next((words for said, words in BECAUSE.items() if said in reason), reason)


def _lacking(row: Mapping[str, Any]) -> list[str]:
    """A line for each column that a class with RoPE lacks, with the reason, and one for the methods it refuses."""
    if "error" in row or not row["rope"]:
        return []
    lines = [f"{column}: {row[column]['reason']}" for column in COLUMNS if not row[column]["works"]]
    refused_methods = [name for name, reason in row["methods"].items() if reason]
    return lines + ([f"methods refused: {', '.join(refused_methods)}"] if refused_methods else [])


def _summary(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"ERROR {row['error'][:150]}"
    if not row["rope"]:
        return "no RoPE"
    return " ".join(column if row[column]["works"] else f"no {column}" for column in COLUMNS)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

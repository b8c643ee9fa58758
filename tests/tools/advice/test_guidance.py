"""What methods state about when to use them: each sentence follows from what is computed, measured or published."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from docs.figures.gpu import losses
from docs.figures.real_models import entries, merged_entries
from docs.figures.registry import read_result
from rope_ext_hf.errors import RopeExtError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.registry import list_methods, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.models.recipes import recipes
from rope_ext_hf.runs.conclusions.statistics import estimate
from rope_ext_hf.tools import serving
from rope_ext_hf.tools.advice.guidance import (
    NOTHING,
    PYTHON,
    ROTATED_AGAIN,
    SERVING,
    SHORT_INPUTS,
    TURNED_WHEN_READ,
    ZONES,
    guidance_of,
    guided_methods,
)
from rope_ext_hf.tools.advice.measured import rises_at
from tests.support.commands import run, run_json
from tests.support.every_model import tiny
from tests.support.models import build

ROOT = Path(__file__).parents[3]
ROTARY = Rotary(dim=64, theta=10000.0, trained_length=4096)
LONG = 16 * ROTARY.trained_length


def distances(name: str) -> Tensor:
    """Relative positions at which the last query of a long input sees all keys, nearest first."""
    method = resolve_method(name, ROTARY, target_length=LONG)
    assert isinstance(method, RemappingMethod)
    return method.bind(ROTARY, LONG).distance(torch.tensor(LONG - 1), torch.arange(LONG)).flip(0)


def bound(name: str) -> RemappingMethod:
    method = resolve_method(name, ROTARY, target_length=LONG)
    assert isinstance(method, RemappingMethod)
    return method.bind(ROTARY, LONG)


def served_by(name: str) -> int:
    """How many engines serve a method by their own name of it."""
    served = 0
    for engine in ("vllm", "sglang", "llama.cpp", "mlx", "transformers"):
        try:
            served += serving.serving_config(build("llama"), engine, name, factor=4).encoding == "native"
        except RopeExtError:
            continue
    return served


def losses_of_larger_factors() -> list[tuple[float, float]]:
    """The rise of the loss under ntk at twice the length, with a factor of 2 and of 4, of each measured model."""
    lines = [json.loads(line) for line in (ROOT / "benchmarks" / "results.jsonl").read_text().splitlines()]
    last = {
        line["model"]: line
        for line in lines
        if line["benchmark"] == "factors" and any(row["method"] == "ntk" for row in line["rows"])
    }
    return [
        tuple(
            next(
                row["increase"]
                for row in line["rows"]
                if (row["method"], row["factor"], row["length"]) == ("ntk", factor, 2 * line["context_length"])
            )
            for factor in (2, 4)
        )
        for line in last.values()
    ]


def answers_fewer(name: str, other: str) -> bool:
    """Whether the bundled model answers fewer questions under a method than under another, at every length measured."""
    lines = map(json.loads, (ROOT / "benchmarks" / "results.jsonl").read_text(encoding="utf-8").splitlines())
    exact = {
        (row["name"], row["length"]): row["exact"]
        for line in lines
        if line["benchmark"] == "retrieval" and line.get("model", "reference") == "reference"
        for row in line["rows"]
        if row["keys"] == 1
    }
    both = [(share, exact[other, length]) for (method, length), share in exact.items() if method == name]
    return len(both) > 2 and all(mine < theirs for mine, theirs in both)


def mrrope_over_yarn() -> list[tuple[float, float]]:
    """The 95% intervals of how much higher the loss is than under yarn, both with the paper's band."""
    lines = [json.loads(line) for line in (ROOT / "benchmarks" / "results.jsonl").read_text().splitlines()]
    rows = [row for line in lines if line["benchmark"] == "bands" for row in line["rows"]]
    found = [(row["over_low"], row["over_high"]) for row in rows if row["method"] == f"mrrope x{row['factor']}"]
    assert len(found) >= 8
    return found


def published(rope_type: str) -> bool:
    """Whether a publisher states a longer context by this rope type, or a family's model was trained under it."""
    return any(rope_type in (recipe.entry or {}).values() or rope_type in str(recipe.where) for recipe in recipes())


def rope_scaling_of(name: str) -> dict[str, Any]:
    """Of a published configuration."""
    config = json.loads((ROOT / f"conformance/configurations/{name}.json").read_text(encoding="utf-8"))["config"]
    scaling: dict[str, Any] = config.get("rope_scaling") or config["rope_parameters"]
    return {"type": scaling.get("rope_type"), **scaling}


BASES: dict[str, tuple[str, Callable[[], bool]]] = {
    "linear": ("the model will be fine-tuned, or was trained under it", lambda: published("linear")),
    "ntk": (
        "a factor above the length that is needed can be given",
        lambda: all(large < small for small, large in losses_of_larger_factors()),
    ),
    "by-parts": (
        "yarn is wanted without its attention factor",
        lambda: (
            torch.equal(*(resolve_method(m, ROTARY, factor=4).frequencies(ROTARY)[0] for m in ("by-parts", "yarn")))
            and resolve_method("by-parts", ROTARY, factor=4).frequencies(ROTARY).attention_factor == 1.0
        ),
    ),
    "yarn": (
        "the model must load in other software, or will be fine-tuned",
        lambda: served_by("yarn") == 5 and published("yarn"),
    ),
    "mrrope": (
        "what its paper reports is to be tried; measured here, its loss is yarn's, and it answers fewer questions",
        lambda: all(low <= 0 <= high for low, high in mrrope_over_yarn()) and answers_fewer("mrrope", "yarn"),
    ),
    "llama3": ("the model belongs to a family that was trained with it", lambda: published("llama3")),
    "rerope": (
        "the length is open-ended; the order of distant keys is lost",
        lambda: bound("rerope").extended_length(ROTARY) is None and float(distances("rerope")[2048:].std()) == 0.0,
    ),
    "leaky-rerope": (
        "the extended length is known and the exact order of distant keys matters",
        lambda: (
            bound("leaky-rerope").extended_length(ROTARY) is not None
            and bool((distances("leaky-rerope").diff() > 0).all())
        ),
    ),
    "self-extend": (
        "the extended length is known; positions stay whole numbers, as in training",
        lambda: (
            bound("self-extend").extended_length(ROTARY) is not None
            and torch.equal(distances("self-extend"), distances("self-extend").round())
        ),
    ),
    "dynamic-self-extend": (
        "no extended length is known, and the order of distant keys matters",
        lambda: (
            bound("dynamic-self-extend").extended_length(ROTARY) is None
            and bool((distances("dynamic-self-extend").diff() >= -1).all())  # floors taken apart: one place at most
            and float(distances("dynamic-self-extend")[ROTARY.trained_length :].std()) > 0.0
        ),
    ),
    "jet-long": (
        "results are to be compared with those published for it",
        lambda: "Jet-Long" in (list_methods()["jet-long"].__doc__ or ""),
    ),
    "dca": (
        "speed matters: cached keys are never rotated again",
        lambda: not bound("dca").local_zone_exact,
    ),
    "stairs": (
        "the length is open-ended and cached keys must stay as an engine has them",
        lambda: (
            bound("stairs").extended_length(ROTARY) is None
            and torch.equal(bound("stairs").key_position(torch.arange(9)).tokens(), torch.arange(9).double())
        ),
    ),
    "alibi": ("far keys are to fade out, or the model was trained with the bias", lambda: fades_out("alibi")),
    "kerple": ("far keys are to fade out, or the model was trained with the bias", lambda: fades_out("kerple")),
    "dynamic-ntk": (
        "the model is published with it (rope type dynamic)",
        lambda: all(
            rope_scaling_of(name)["type"] == "dynamic" for name in ("internlm2-chat-1.8b", "internlm3-8b", "hunyuan-7b")
        ),
    ),
    "dynamic-yarn": (
        "attention must stay the model's own",
        lambda: not issubclass(list_methods()["dynamic-yarn"], RemappingMethod),  # the only ones that attend themselves
    ),
    "longrope": (
        "short inputs have a list of divisors of their own, as in Phi-3",
        lambda: {"short_factor", "long_factor"} <= set(list_methods()["longrope"].__dataclass_fields__),
    ),
    "factors": (
        "each pair has a divisor of its own",
        lambda: "factors" in list_methods()["factors"].__dataclass_fields__,
    ),
    "theta": (
        "the model will be fine-tuned for long",
        lambda: bool(getattr(guidance_of("theta"), "unmeasured", "")),  # so that it is never advised
    ),
    "default": (
        "no full-attention layer rotates, so that only the length in the config has to grow",
        lambda: changed_settings(rope.patch(without_rope(), "default", target_length=4096)) == {LENGTH_KEY},
    ),
    "temperature": (
        "no full-attention layer rotates, and it reads better than the model as it is; no such model was measured here",
        lambda: (
            rope.describe(without_rope()).rotating_layers == (0, 1)
            and "temperature" in (rope.describe(without_rope()).notes[0])
            and not rises_at("temperature", 4)
        ),
    ),
    "nope": (
        "the model can be trained on billions of tokens, and no extended length is known",
        lambda: minutes_do_not_suffice("nope") and "10.5 billion tokens" in list_methods()["nope"].training.published,
    ),
    "cope": (
        "the model will be trained with it; without training it read worse than yarn on every model measured here",
        lambda: read_worse_than_yarn("cope"),
    ),
    "learnable": (
        "the frequencies themselves are to be trained",
        lambda: any(p.requires_grad for p in rope.RotaryEmbedding("learnable", ROTARY).parameters()),
    ),
}
"""By method: when to use it, as it is written there, and what that follows from."""


def minutes_do_not_suffice(name: str) -> bool:
    """True if the bundled model, trained under a method for minutes, reads every length worse than under yarn."""
    lines = map(json.loads, (ROOT / "benchmarks" / "results.jsonl").read_text(encoding="utf-8").splitlines())
    trained = {
        (line["method"], line["minutes"]): line["losses"]
        for line in lines
        if line["benchmark"] == "recalibration" and line["minutes"]
    }
    least = min(minutes for method, minutes in trained if method == "yarn")
    yarn, others = trained["yarn", least], [losses for (method, _), losses in trained.items() if method == name]
    return len(others) > 1 and all(losses[length] > yarn[length] for losses in others for length in yarn)


def read_worse_than_yarn(name: str) -> bool:
    """True if each real model with both reads long inputs significantly worse under the method than under yarn."""
    worse = []
    for entry in merged_entries():
        for multiple in (1.5, 2, 4):
            length = str(int(multiple * entry["context_length"]))
            losses: dict[str, dict[str, float]] = {}
            for row in entry["texts"]:
                if row["multiple"] == multiple and length in row["loss"]:
                    losses.setdefault(row["method"], {})[row["text"]] = row["loss"][length]
            both = losses.get(name, {}).keys() & losses.get("yarn", {}).keys()
            if len(both) > 2:
                low = estimate([losses[name][text] - losses["yarn"][text] for text in both], [1.0] * len(both)).low
                worse.append(low is not None and low > 0)
    return len(worse) > 1 and all(worse)


LENGTH_KEY = "max_position_embeddings"


def without_rope() -> Any:
    """A model whose full-attention layer does not rotate."""
    return tiny("cohere2")


def changed_settings(model: Any) -> set[str]:
    """The settings in the config of a patched model that the config of the unpatched one has otherwise.

    The record of the patch, which plain transformers does not read, is none of them.
    """
    patched = dict(model.config.to_dict())
    plain = rope.unpatch(model).config.to_dict()
    return {key for key in plain if patched[key] != plain[key]}


def fades_out(name: str) -> bool:
    method = bound(name)
    bias = method.score_bias(4, LONG)
    assert bias is not None
    by_distance = bias(torch.tensor([[LONG - 1]]), torch.arange(LONG)[None])[0, :, 0].flip(-1)
    return bool((by_distance.diff(dim=-1) <= 0).all()) and bool((by_distance[:, -1] < 0).all())


def test_every_sentence_has_its_base() -> None:
    stated = {name: known.when for name in list_methods() if (known := guidance_of(name)) and known.when}
    assert {name: sentence for name, (sentence, _) in BASES.items()} == stated, (
        "add what the sentence follows from to BASES: what is computed, measured or published"
    )


@pytest.mark.parametrize("name", BASES)
def test_the_base_of_a_sentence_holds(name: str) -> None:
    assert BASES[name][1]()


def test_what_a_generated_token_takes_follows_from_the_kind_of_method() -> None:
    for name, cls in list_methods().items():
        known = guidance_of(name)
        if known is None:
            continue
        method = resolve_method(name, ROTARY, factor=4) if name.startswith("dynamic") else None
        if issubclass(cls, RemappingMethod) and bound(name).depends_on_total_length:
            expected = TURNED_WHEN_READ
        elif method is not None:
            expected = ROTATED_AGAIN if method.length_dependent else NOTHING
        elif not issubclass(cls, RemappingMethod):
            expected = NOTHING  # longrope too: one of two lists, by the length of the input
        else:
            expected = ZONES if bound(name).moves_keys else "slower scores beyond the context length"
            expected = NOTHING if bound(name).scales_queries_only else expected
        assert known.decode == expected, name


def test_the_page_says_where_jet_long_reads_less_far() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert "`dynamic-self-extend`, which has the shift, reads further on every model measured here" in page
    for scale in (4, 8, 16, 32):
        shifted = {rise.model: rise.increase for rise in rises_at("dynamic-self-extend", scale)}
        plain = {rise.model: rise.increase for rise in rises_at("jet-long", scale)}
        assert len(plain) >= 3
        assert all(shifted[model] < increase for model, increase in plain.items())


def losses_on_real_models(scale: int) -> list[dict[str, dict[str, float]]]:
    """The losses at a multiple of the context length, in bits per token: by record, by method, by text.

    Static methods have that multiple as their factor.
    """
    tables = []
    for entry in entries():
        table: dict[str, dict[str, float]] = {}
        for row in entry["texts"]:
            if row["multiple"] == scale and (loss := row["loss"].get(str(scale * entry["context_length"]))):
                table.setdefault(row["method"], {})[row["text"]] = loss / math.log(2)
        tables.append(table)
    length = scale * entries()[0]["context_length"]  # of the model that the GPU measured, too
    by_label = {method: row.get(length, []) for method, row in losses(read_result("gpu-nvidia-h200")).items()}
    named = {label.removesuffix(f" x{scale}"): values for label, values in by_label.items()}
    tables.append({name: {str(n): loss / math.log(2) for n, loss in enumerate(row)} for name, row in named.items()})
    return tables


@pytest.mark.parametrize("purpose", [SERVING, PYTHON, SHORT_INPUTS])
def test_no_candidate_reads_significantly_better_than_the_recommended_one(purpose: str) -> None:
    """On real models, as far as they were measured; the order of guidance.toml is that of the recommendations.

    Two methods are compared on the texts that both have read.
    """
    guided = {name: known for name in guided_methods() if (known := guidance_of(name)) and not known.unrotated}
    first, *others = [name for name, known in guided.items() if purpose in known.purposes]
    compared = set()
    for scale in (2, 4):
        assert [rise for rise in rises_at(first, scale) if not rise.model.is_small], (first, scale)
        for table in losses_on_real_models(scale):
            for name in others:
                texts = sorted(table.get(name, {}).keys() & table.get(first, {}).keys())
                if not texts:
                    continue
                rise = estimate([table[name][text] - table[first][text] for text in texts], [1.0] * len(texts))
                assert rise.high is None or rise.high >= 0, (name, scale)
                assert rise.value > -0.02, (name, scale)  # bits, where intervals are missing
                compared.add(name)
    assert compared == set(others)


def test_methods_shows_those_that_are_recommended_first() -> None:
    _, out, _ = run("methods")
    (serving_line,) = [line for line in out.splitlines() if SERVING in line]
    assert out.startswith("Recommended")
    assert serving_line.removeprefix(SERVING).split() == ["yarn,", "mrrope"]
    assert {row["method"] for row in run_json("methods") if PYTHON in row["recommended"]} == {
        *("dca", "dynamic-self-extend", "rerope"),
    }

"""Record of what other programs compute from a config, docs/results/programs.json.

    nox -s programs                   # every program that can be installed
    nox -s programs -- ctranslate2    # some of them; what the record has of the others is kept

Each program reads published configs as transformers 5 saves them (with rope_parameters), as transformers 4 did
(rope_scaling and rope_theta), and with all three keys, as folders of this package have them. A port in ports/ asks the
program, in an environment of its own, and its numbers are compared with the papers' formulas in 40 digits. Programs
that give no frequencies run a small model with random weights, whose logits are compared with those of transformers.

Under `changed` the record has the same configs with another factor, theta and size of heads: a rule of this package
that holds for them too does not only repeat what is known of published configs. Under `folders` it has the configs of
folders that this package saved.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from checks.programs.folders import FAMILIES, METHODS, saved_configs
from tests.conformance import formulas

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULT = ROOT / "docs" / "results" / "programs.json"
PROGRAMS = tomllib.loads((HERE / "programs.toml").read_text(encoding="utf-8"))
CONFIGS = (
    *("llama-3-8b", "mistral-7b-v0.3", "llama-3.1", "llama-3.2", "vicuna-7b-16k", "gemma-3-4b", "internlm3-8b"),
    *("qwen2.5-7b-yarn", "qwen3-8b-yarn", "yarn-llama-2-7b-128k", "gpt-oss-20b", "olmo-3", "deepseek-v3"),
    *("phi-3-mini-128k", "phi-4-mini"),
)
"""Configurations of conformance/: each scaling in one or more of the families that people use it with."""
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")
SPELLINGS = ("rope_parameters", "rope_scaling", "both")
RUN, ORIGINAL = 300, 64
"""Tokens that small models read; their original length where the scaling depends on the length of the input."""
SIZES = {"num_hidden_layers": 2, "vocab_size": 71, "intermediate_size": 64}
"""Of small models. A layer as wide as the vocabulary would pass for the last one of ONNX Runtime GenAI's builder."""
TOLERANCE, LOGITS_TOLERANCE = 2e-5, 1e-3
"""Relative differences of frequencies; root mean square difference of logits in standard deviations."""
Json = dict[str, Any]


class Question(NamedTuple):
    """A config in one spelling, and the layers and inputs it is asked about."""

    name: str  # of the configuration
    spelling: str
    config: Json
    published: Json  # the same as published, for the formulas
    layer_type: str | None
    length: int | None
    context_length: int  # for which a user asks the program, in tokens
    original_length: int  # before the scaling


def spelled(config: Json, spelling: str) -> Json:
    """Return a config with its rope settings under the keys of a spelling."""
    given = json.loads(json.dumps(config))
    loaded = AutoConfig.for_model(given.pop("model_type"), **given)
    with tempfile.TemporaryDirectory() as folder:
        loaded.save_pretrained(folder)
        saved: Json = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    if spelling == "rope_parameters":
        return saved
    former = {key: config[key] for key in ("rope_theta", "rope_scaling", "rope_local_base_freq") if key in config}
    if spelling == "rope_scaling":
        del saved["rope_parameters"]
    return saved | former


def configuration(name: str, *, changed: bool = False) -> Json:
    """Return a configuration of conformance/, or one with another factor, theta and size of heads."""
    path = ROOT / "conformance" / "configurations" / f"{name}.json"
    entry: Json = json.loads(path.read_text(encoding="utf-8"))
    if changed:
        config, scaling = entry["config"], entry["config"].get("rope_scaling") or {}
        config["rope_theta"] *= 1.5
        if "factor" in scaling:
            scaling["factor"] *= 1.5
            entry["context_length"] = round(1.5 * entry["context_length"])
        if "long_factor" in scaling:  # as many divisors as there are pairs of dims
            scaling["long_factor"] = [1.25 * divisor for divisor in scaling["long_factor"]]
        elif "qk_rope_head_dim" not in config:
            config["num_attention_heads"] *= 2
            config["num_key_value_heads"] *= 2
            config["head_dim"] //= 2
    return entry


def questions(names: tuple[str, ...], *, changed: bool = False) -> Iterator[Question]:
    """Yield every question about these configurations of conformance/, in every spelling."""
    for name in names:
        entry = configuration(name, changed=changed)
        for spelling in SPELLINGS:
            for row in entry["rows"]:
                config = spelled(entry["config"], spelling)
                lengths = max(entry["context_length"], row["length"] or 0), entry["original_length"]
                yield Question(name, spelling, config, entry["config"], row["layer_type"], row["length"], *lengths)


def shortened(config: Json) -> Json:
    """Return a config for an original length of `ORIGINAL` tokens, with its other length in proportion."""
    given: Json = json.loads(json.dumps(config))
    original = given.get("original_max_position_embeddings", given["max_position_embeddings"])
    for key in ("max_position_embeddings", "original_max_position_embeddings"):
        if key in given:
            given[key] = given[key] * ORIGINAL // original
    return given


def small_questions(names: tuple[str, ...], *, changed: bool = False) -> Iterator[Question]:
    """Yield the questions to a program that gives logits: a model has one answer for all its layers.

    Where the scaling depends on the length of the input, one is about an input of the original length and one about a
    longer input: an exporter may keep what holds for its example.
    """
    for name in names:
        entry = configuration(name, changed=changed)
        depends = entry["rows"][0]["length"] is not None
        config = shortened(entry["config"]) if depends else entry["config"]
        for spelling in SPELLINGS:
            for length in (ORIGINAL, RUN) if depends else (None,):
                lengths = max(entry["context_length"], length or 0), entry["original_length"]
                yield Question(name, spelling, spelled(config, spelling), config, None, length, *lengths)


def folder_questions() -> Iterator[Question]:
    """Yield the questions about folders that this package saved."""
    published = {name: configuration(name)["config"] for name in FAMILIES.values()}
    for name, config in saved_configs(published):
        formerly = config | {"rope_theta": config["rope_parameters"]["rope_theta"]}
        family, method = name.split(", ")
        original = published[FAMILIES[family]]["max_position_embeddings"]
        yield Question(name, "saved", config, formerly, None, None, round(original * METHODS[method]), original)


def unscaled(config: Json, theta: float | None = None) -> Json:
    """Return a config without its scaling; `theta`: another base."""
    kept = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
    return kept if theta is None else kept | {"rope_theta": theta}


def with_one_list(config: Json, name: str) -> Json:
    """Return a LongRoPE config that has the same list for short and long inputs; another config as it is."""
    given: Json = json.loads(json.dumps(config))
    settings = given.get("rope_scaling") or {}
    if name in settings:
        settings |= {"short_factor": settings[name], "long_factor": settings[name]}
    return given


WRONG: dict[str, Callable[[Json], Json]] = {
    "unscaled": unscaled,
    "unscaled, theta 10,000": lambda config: unscaled(config, 10_000.0),
    "short list for a long input": lambda config: with_one_list(config, "short_factor"),
    "long list for a short input": lambda config: with_one_list(config, "long_factor"),
}
"""Configs that a program may run in place of the given one, without a word."""


def state_of(question: Question, given: Json) -> str:
    """Return "right", the name of a wrong config, or what differs."""
    computed = np.array(given["inv_freq"])
    right = formulas.read(question.published, question.layer_type, question.length)
    magnitude = given.get("magnitude", float(right.magnitude))
    length = question.published["max_position_embeddings"]
    positions = min(given.get("table", length), length)
    configs = {"right": question.published} | {name: change(question.published) for name, change in WRONG.items()}
    for name, config in configs.items():
        rope = formulas.read(config, question.layer_type, question.length)
        alike = agrees(computed, rope) and abs(magnitude / float(rope.magnitude) - 1) <= TOLERANCE
        if alike and positions == length:
            return name
    expected = np.array([float(f) for f in right.inv_freq])
    if computed.shape != expected.shape:
        return f"{computed.size} pairs rotate instead of {expected.size}"
    ratios = computed / expected
    differing = np.abs(ratios - 1) > TOLERANCE
    said = []
    if differing.any():
        said.append(f"{differing.sum()} of {differing.size} frequencies differ, {speed(ratios)}")
    if abs(magnitude / float(right.magnitude) - 1) > TOLERANCE:
        said.append(f"magnitude {magnitude:.4g} instead of {float(right.magnitude):.4g}")
    if positions < length:
        said.append(f"angles for only the first {positions:,} of {length:,} positions")
    return "; ".join(said)


def speed(ratios: Any) -> str:
    """Return how far off the worst of some frequencies is, from their ratios to the right ones."""
    worst = float(ratios[np.abs(np.log(ratios)).argmax()])
    return f"up to {worst:.3g} times too fast" if worst > 1 else f"up to {1 / worst:.3g} times too slow"


def agrees(computed: Any, rope: formulas.Rope) -> bool:
    """Return whether frequencies are those of a rope."""
    expected = np.array([float(f) for f in rope.inv_freq])
    return computed.shape == expected.shape and bool(np.allclose(computed, expected, rtol=TOLERANCE, atol=0))


# --- programs that give logits --------------------------------------------------------------------------------------


def small_model(config: Json, folder: Path) -> Any:
    """Save a model of two layers with random weights and a tokenizer, and return the model."""
    given = json.loads(json.dumps(config)) | SIZES
    given |= {"dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    if given.get("layer_types"):
        given["layer_types"] = given["layer_types"][:2]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(given.pop("model_type"), **given)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:  # scores large enough that positions matter
                weight.mul_(6)
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))  # transformers spells them its own way
    saved = {key: value for key, value in saved.items() if key not in ROPE_KEYS}
    saved |= {key: config[key] for key in ROPE_KEYS if key in config}
    (folder / "config.json").write_text(json.dumps(saved, indent=2), encoding="utf-8")
    tokenizer(SIZES["vocab_size"]).save_pretrained(folder)
    return model


def tokenizer(words: int) -> Any:
    """Return a tokenizer with a word for each id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    # Some loaders add the last of these where a tokenizer lacks it, which would make a word too many.
    special = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|endoftext|>": 3}
    vocabulary = special | {f"w{i}": i for i in range(len(special), words)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<unk>")), unk_token="<unk>", bos_token="<s>",
        eos_token="</s>",
    )  # fmt: skip


def last_logits(model: Any, config: Json, ids: list[int]) -> Any:
    """Return the logits of the last token by transformers, for the weights of a model under another config."""
    given = json.loads(json.dumps(config)) | SIZES
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(given.pop("model_type"), **given)).float().eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        return other(torch.tensor([ids]), use_cache=False).logits[0, -1].double().numpy()


def difference(logits: Any, expected: Any) -> float:
    """Return the root mean square difference of logits, in standard deviations of the expected ones."""
    return float(np.sqrt(np.mean((np.array(logits) - expected) ** 2)) / expected.std())


def row_of(length: int) -> list[int]:
    """Return the token ids of an input of this length."""
    return [3 + (7 * index) % 61 for index in range(length)]


def state_of_logits(question: Question, model: Any, ids: list[int], given: Json) -> str:
    """Return the state as `state_of` does, for a program that gives logits."""
    computed = np.array(given["logits"][0])
    differences = {}
    configs = {"right": question.published} | {name: change(question.published) for name, change in WRONG.items()}
    for name, config in configs.items():
        differences[name] = difference(computed, last_logits(model, config, ids))
    best = min(differences, key=differences.__getitem__)
    return best if differences[best] <= LOGITS_TOLERANCE else f"logits differ by {differences['right']:.2g} deviations"


# --- the record -----------------------------------------------------------------------------------------------------


def ask(python: str, port: str, asked: list[Json], script: str = "ask.py") -> Json:
    """Return the answers of a port to a script's questions; it runs under the interpreter of its program."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "questions.json"), Path(folder, "answers.json")
        files[0].write_text(json.dumps(asked), encoding="utf-8")
        command = [python, str(HERE / script), port, *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if not files[1].exists():
            raise SystemExit(f"{port}: {done.stderr[-2000:]}")
        answers: Json = json.loads(files[1].read_text(encoding="utf-8"))
    return answers


def record_of(program: str, python: str) -> Json:
    """Return what is recorded of one program."""
    entry = PROGRAMS[program]
    by_logits = entry.get("logits", False)
    names = tuple(entry["families"]) if by_logits else (*CONFIGS, *entry.get("more", ()))
    ask_about = small_questions if by_logits else questions
    parts = {
        "states": ask_about(names),
        "changed": ask_about(names, changed=True),
        "folders": folder_questions(),
    }
    record: Json = {"date": datetime.now(UTC).date().isoformat()}
    for part, asked in parts.items():
        record[part], record["version"] = states_of(program, python, list(asked))
    return record


def states_of(program: str, python: str, asked: list[Question]) -> tuple[Json, str]:
    """Return the answers of a program, as states by spelling, by configuration and by row, and its version."""
    port = PROGRAMS[program].get("port", program)
    by_logits = PROGRAMS[program].get("logits", False)
    read = [row_of(each.length or RUN) for each in asked]
    states: Json = {each.spelling: {} for each in asked}
    with tempfile.TemporaryDirectory() as folder:
        models: list[Any] = []
        rows: list[Json] = []
        for index, each in enumerate(asked):
            row: Json = {"config": each.config, "layer_type": each.layer_type, "length": each.length}
            row |= {"context_length": each.context_length, "original_length": each.original_length}
            if by_logits:
                models.append(small_model(each.config, Path(folder, str(index))))
                row |= {"folder": str(Path(folder, str(index))), "rows": [read[index]]}
            rows.append(row)
        answers = ask(python, port, rows)
    for index, (each, given) in enumerate(zip(asked, answers["answers"], strict=True)):
        if "refused" in given:
            state = f"refused: {given['refused']}"
        elif "missing" in given:
            state = "-"  # not asked
        elif by_logits:
            state = state_of_logits(each, models[index], read[index], given)
        else:
            state = state_of(each, given)
        row_name = ", ".join(str(part) for part in (each.layer_type, each.length) if part is not None)
        states[each.spelling].setdefault(each.name, {})[row_name] = state
    return states, answers["version"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("programs", nargs="+", metavar="NAME=PYTHON", help="a program and its interpreter")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    content: Json = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"programs": {}}
    content["command"] = "nox -s programs"
    content["versions"] = {package: version(package) for package in ("rope-ext-hf", "torch", "transformers")}
    for word in given.programs:
        name, _, python = word.partition("=")
        content["programs"][name] = record_of(name, python)
        counts: dict[str, int] = {}
        for part in ("states", "changed", "folders"):
            for cells in content["programs"][name][part].values():
                for state in (state for rows in cells.values() for state in rows.values()):
                    kind = state.partition(":")[0]
                    counts[kind] = counts.get(kind, 0) + 1
        print(name, content["programs"][name]["version"], counts, file=sys.stderr)
    content["programs"] = dict(sorted(content["programs"].items()))
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

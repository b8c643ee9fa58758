"""The model card of a folder: what it was made from, how it is loaded and served, and what was measured of it.

The metadata and the text of the source's card are kept, as text, whoever wrote them. What is written here stands before
that text, between two comments, and is replaced when it is written anew. Results also go to .eval_results, as
huggingface_hub defines them.
"""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rope_ext_hf import __version__
from rope_ext_hf.errors import FileError, RopeExtError, one_line, printable, short
from rope_ext_hf.files import PlainLoader, disk_errors, list_files, resolve_inside, write_text
from rope_ext_hf.hub import folder_and_hub_id, foreign_errors, load_empty, load_model
from rope_ext_hf.patches.adapters import find_adapter
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.patches.fingerprint import fingerprint_of
from rope_ext_hf.patches.slots import patched_slots, present_specs
from rope_ext_hf.runs.folder import read_run
from rope_ext_hf.runs.identity import Basis
from rope_ext_hf.runs.labels import label, method_key
from rope_ext_hf.runs.measures import Measure
from rope_ext_hf.runs.model_digest import model_digest
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.statistics import Estimate
from rope_ext_hf.terminal import as_wide_as
from rope_ext_hf.tools.engines.base import list_engines
from rope_ext_hf.tools.serving.configs import Model, configure, make_target, open_model

CARD = "README.md"
RESULTS = ".eval_results"
_BEGIN, _MEASURED, _END = (f"<!-- rope-ext: {part} -->" for part in ("card", "measured", "end of the card"))
_ORIGIN = re.compile(r"^The weights come from .*\. (?=Written by )", re.MULTILINE)
_MOST_BYTES = 2**20
CARD_COLUMNS = 100
_LICENCES = ("license", "licence", "notice", "copying", "use_policy")  # files with conditions, by how they begin
_ROWS = ("method", "over", "context length", "extended length", "saved as", "published", "short inputs", "note")
"""What the card says of what `describe` does."""


def made_from(model: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return the arguments of `write_card` for a source by its name; one on the Hub is downloaded, with its licence."""
    folder, base_model = folder_and_hub_id(model, revision=revision)
    return {"source": folder, "base_model": base_model, "trust_remote_code": trust_remote_code}


def write_card(
    folder: str | Path,
    runs: Iterable[Run[Any] | str | Path] = (),
    *,
    name: str | None = None,
    source: str | Path | None = None,
    base_model: str | None = None,
    about: str = "",
    trust_remote_code: bool = False,
    model: Any = None,
) -> Path:
    """Write the card of a model's folder, README.md, and its results by length into .eval_results.

    Args:
        folder: of a model or an adapter, patched or not.
        runs: of this model, or of its source with the method that it carries. That a run's folder is of these weights
            is checked, for which they are read; a run in memory was measured just now. Without any, what the card says
            of earlier ones stays.
        name: what the card and its commands call the model; default: the folder's name.
        source: the folder of the model that it was made from, whose card and licence are kept; default: the card in
            `folder` is continued.
        base_model: the Hub id of that model; default: the one that the card states.
        about: how it was made, in lines; they stay, as the text of the source does.
        trust_remote_code: whether the Python code that comes with the model may run.
        model: the patched model that the folder was written from just now; default: it is loaded, without weights.

    Raises:
        FileError: a card whose metadata cannot be read, a run of another model or without this method, or what the disk
            refuses. A source's card costs a warning, and its metadata.
        CheckpointError: no such model.
    """
    from huggingface_hub import ModelCard, ModelCardData

    file, folder = Path(folder) / CARD, Path(folder).resolve()
    name = name or folder.name
    described = folder if source is None else Path(source)  # by the card that is kept
    values, author, origin, known = _read_card(described, own=source is None)
    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    model, adapter = model or load_empty(folder, **trust), find_adapter(folder) is not None
    given = list(_checked(folder, model, runs, **trust))
    measured = "".join([_measured_text(*each) for each in given]) or known
    specs = present_specs(model)
    tags: list[Any] = values["tags"] if isinstance(values.get("tags"), list) else []
    new = ["rope", "long-context", *[spec.method.name for spec in specs[-1:]]]
    values["tags"] = [*tags, *[tag for tag in new if tag not in tags]]
    values.setdefault("library_name", "peft" if adapter else "transformers")
    if base_model is not None:
        values |= {"base_model": base_model, "base_model_relation": "adapter" if adapter else "finetune"}
    named = base_model or (source and described.name)
    origin = f"The weights come from {_plain(named)}. " if named else origin
    rows = [(key, text) for key, text in describe(model).rows if key in _ROWS]
    rows.append(("fingerprint", f"{fingerprint_of(model).digest}, by `rope_ext_hf.fingerprint`"))
    title = f"# {_plain(name)}\n\n{origin}Written by rope_ext_hf {__version__}."
    loading = f"## How to load it\n\n{_loading(folder, model, name)}"
    made = "\n\n".join([title, _table([("RoPE", "of this model"), *rows]), loading, *_serving(folder, name, **trust)])
    text = (f"\n## How it was made\n\n{_code(about)}\n" if about else "") + author
    own = f"{_BEGIN}\n{made}\n{_MEASURED}{measured}{_END}"
    head = ModelCardData(**values).to_yaml(original_order=list(values))
    with disk_errors(folder):
        for licence in list_files(described) if source is not None else ():
            if licence.lower().startswith(_LICENCES) and not (folder / licence).exists():
                shutil.copyfile(resolve_inside(described, licence), folder / licence)
        if given:
            _write_results(folder / RESULTS, given)
    return write_text(file, str(ModelCard(f"---\n{head.strip()}\n---\n\n{own}\n{text}")))


# --- the card that is there -------------------------------------------------------------------------------------------


def _read_card(folder: Path, *, own: bool) -> tuple[dict[str, Any], str, str, str]:
    """The card of a folder: its metadata, its author's text, and what was written here of the source and of runs.

    With `own` it is of the model itself; else its results are left out, as another model's, and metadata that cannot be
    read cost a warning.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if not (folder / CARD).exists():
        return {}, "", "", ""
    file = resolve_inside(folder, CARD)
    with disk_errors(file):
        if file.stat().st_size > _MOST_BYTES:
            raise FileError(f"{str(file)!r} has more than {_MOST_BYTES:,} bytes, which no card needs")
        content = file.read_bytes().decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    head = REGEX_YAML_BLOCK.search(content)
    text, origin, measured, values = content[head.end() :] if head else content, "", "", dict[str, Any]()
    try:
        if head is not None:
            values = _metadata(head[2])
        elif content.startswith("---\n"):
            raise ValueError("the line --- that ends them is missing")
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        problem = getattr(error, "problem", None) or one_line(error)
        sentence = f"the metadata at the beginning of {str(file)!r} cannot be read: {problem}"
        if own:
            raise FileError(f"{sentence}; correct them, or remove the file") from error
        warnings.warn(f"{sentence}; the new card is without them, also without a licence", stacklevel=3)
    if not own:
        values.pop("model-index", None)
    before, begins, rest = text.partition(_BEGIN)
    if begins and not before.strip():
        made, _, text = rest.partition(f"{_END}\n")
        if own:
            made, _, measured = made.partition(_MEASURED)
            origin = "".join(_ORIGIN.findall(made)[:1])
    return values, text, origin, measured


def _metadata(text: str) -> dict[str, Any]:
    from huggingface_hub import ModelCardData

    values = yaml.load(text, Loader=PlainLoader) or {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError("they are no names with values")
    if taken := next((key for key in values if hasattr(ModelCardData, key)), None):
        raise ValueError(f"{short(taken)!r} is no name of theirs")
    ModelCardData(**values)
    return values


# --- what it is, and how it is loaded ---------------------------------------------------------------------------------


def _loading(folder: Path, model: Any, name: str) -> str:
    """Code that loads the model: by plain transformers, where that loads it right."""
    import transformers

    slots, with_code = patched_slots(model), (folder / "modeling_rope_ext_hf.py").is_file()
    needed = "It needs the package `rope_ext_hf`.\n\n"
    if find_adapter(folder) is None and (with_code or not slots or slots[0].state.encoding.loads_plainly):
        kinds = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")
        found = (each for each in kinds if type(model.config) in getattr(transformers, each)._model_mapping)
        loader, more = next(found, type(model).__name__), ", trust_remote_code=True" if with_code else ""
        lines = (f"from transformers import {loader}", f"model = {loader}.from_pretrained({json.dumps(name)}{more})")
        return (needed if with_code else "") + _code("\n\n".join(lines), "python")
    return needed + _code(f"import rope_ext_hf as rope\n\nmodel = rope.from_pretrained({json.dumps(name)})", "python")


def _serving(folder: Path, name: str, **trust: Any) -> Iterator[str]:
    """What `serve-config` prints for each engine: that of the usual server, then the others, which a click opens."""
    shown, refused = list[tuple[str, str]](), dict[str, list[str]]()

    @cache
    def opened() -> Model:
        model = open_model(folder, **trust)
        model.name = name
        return model

    target = cache(lambda: make_target(opened()))
    servers = [engine() for engine in list_engines().values() if not engine.reference]
    for engine in sorted(servers, key=lambda engine: not engine.usual_server):
        try:
            with foreign_errors("this model cannot be configured for the engine"):
                config = configure(engine, opened(), target())
        except RopeExtError as error:
            reason = " ".join(str(error).split()).replace(str(folder), name)
            refused.setdefault(reason, []).append(engine.label)
            continue
        with as_wide_as(CARD_COLUMNS):
            shown.append((engine.label, _code(str(config), "sh")))
    yield "## How to serve it"
    for number, (engine_label, block) in enumerate(shown):
        folded = f"<details><summary>{engine_label}</summary>\n\n{block}\n\n</details>"
        yield folded if number else f"{engine_label}:\n\n{block}"
    for reason, labels in refused.items():
        yield f"Not by {', '.join(labels)}: {_plain(reason)}"


# --- what was measured ------------------------------------------------------------------------------------------------


def _checked(
    folder: Path, model: Any, runs: Iterable[Run[Any] | str | Path], **trust: Any
) -> Iterator[tuple[Run[Any], str]]:
    """Each run with the results of the model and of its source as loaded alone, and the key of the model's method."""
    specs, digest = present_specs(model), cache(lambda dtype: model_digest(load_model(folder, dtype=dtype, **trust)))
    for given in runs:
        run = given if isinstance(given, Run) else read_run(given)
        what = f"the run in {str(run.path)!r}"
        if not isinstance(given, Run):
            dtype = run.settings["dtype"] if run.settings["dtype"] in ("float32", "bfloat16", "float16") else "auto"
            if digest(dtype) != run.settings.get("weights"):
                raise FileError(f"{what} is of other weights than those in {str(folder)!r}")
        loaded = run.settings["loaded"]
        method = specs[-1].method.to_dict() if specs else loaded
        basis = json.loads(json.dumps(Basis.from_specs(specs).to_dict() if specs else run.settings["basis"]))
        chosen, key = run.select([loaded, method]), method_key(method)
        found = any(method_key(result.method) == key for result in chosen.results)
        if not found or basis != json.loads(json.dumps(run.settings["basis"])):
            measured = ", ".join(dict.fromkeys(label(result.method) for result in run.results)) or "nothing yet"
            raise FileError(
                f"{what} has no result of {label(method)} as {str(folder)!r} carries it; it measured {measured}"
            )
        yield chosen, key


def _shown(measure: Measure, key: str, length: int) -> tuple[Estimate, str]:
    """Return the value to publish, with its interval, and both as text."""
    value = measure.estimate(key, length)
    return value, value.text(measure.text)


def _measured_text(run: Run[Any], key: str) -> str:
    """A section of the card: a table for each measure, and what they come to."""
    known, settings = run.findings, run.settings
    parts = [f"\n\n## Measured: {run.kind.name} on {_plain(_data_name(run))}", _plain(str(run.conclusion))]
    for measure in known.ordered:
        compared = key != known.loaded and bool(measure.lengths(known.loaded))
        head = ("tokens", f"{measure.name} (95% confidence interval)")
        rows = [[*head, *(["unpatched", "change"] if compared else [])]]
        for length in measure.lengths(key):
            row = [f"{length:,}", _shown(measure, key, length)[1]]
            if compared and known.loaded in measure.measured(length):
                change = measure.change((key, length), (known.loaded, length))
                row += [_shown(measure, known.loaded, length)[1], "" if change is None else measure.change_text(change)]
            rows.append(row + [""] * (len(rows[0]) - len(row)))
        parts.append(_table(rows))
    versions = ", ".join([f"{name} {number}" for name, number in settings["versions"].items()])
    how = f"{run.kind.items}: {len(settings['items'])}, in {settings['dtype']} on {settings['device']}; {versions}."
    return "\n\n".join([*parts, f"{_plain(how)}\n\n"])


def _data_name(run: Run[Any]) -> str:
    """What was read: a dataset of the Hub by its name, of files the last part of their path."""
    data = printable(str(run.settings["data"]))
    return data if data.startswith("hf:") else data.rpartition("/")[2] or data


def _write_results(folder: Path, runs: Iterable[tuple[Run[Any], str]]) -> None:
    """One YAML file a run, in place of those of an earlier call."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    folder.mkdir(exist_ok=True)
    for old in folder.glob("rope-ext-*.yaml"):
        old.unlink()
    for number, (run, key) in enumerate(runs, 1):
        data, entries = _data_name(run), []
        # a text that is no dataset of the Hub gets a name that none there can have
        dataset = data.removeprefix("hf:").partition("?")[0] if data.startswith("hf:") else f"text:{data}"
        for measure, length in ((each, length) for each in run.findings.ordered for length in each.lengths(key)):
            value, text = _shown(measure, key, length)
            if math.isfinite(value.value):
                name = measure.name.replace(" ", "_")
                notes = f"{run.findings.names[key]}, {text} over {value.items} items; rope-ext-hf {__version__}"
                entries.append(EvalResultEntry(dataset, f"{name}_{length}", round(value.value, 6), notes=notes))
        text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
        write_text(folder / f"rope-ext-{run.kind.name.replace(' ', '-')}-{number}.yaml", text)


# --- Markdown ---------------------------------------------------------------------------------------------------------


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: no HTML, no cells, and no marks of this module."""
    return html.escape(printable(text), quote=False).replace("|", "\\|").replace("\n", " ")


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = [f"| {' | '.join(map(_plain, row))} |" for row in rows]
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *others])


def _code(text: str, language: str = "") -> str:
    """A block of code, fenced by more backticks than the text has in a row."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.strip()}\n{fence}"

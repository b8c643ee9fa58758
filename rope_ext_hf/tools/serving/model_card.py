"""The model card of a folder: its origin, how to load and serve it, and the results of measurements.

The metadata and the text of the source's card are kept, whoever wrote them. The part that is written here stands before
that text, between two comments, and is replaced when the card is written again. Results also go into .eval_results, in
the form that huggingface_hub defines.
"""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rope_ext_hf import __version__
from rope_ext_hf.errors import CheckpointError, FileError, RopeExtError, one_line, printable, short
from rope_ext_hf.files.model_folders import folder_and_hub_id
from rope_ext_hf.files.plain_yaml import PlainLoader
from rope_ext_hf.files.whole import disk_errors, foreign_errors, list_files, resolve_inside, write_text
from rope_ext_hf.hub import fingerprint, is_adapter, load_empty, load_model
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.patches.slots.patched_slot import active_patches, patch_state
from rope_ext_hf.runs.conclusions.labels import method_key
from rope_ext_hf.runs.conclusions.measures import Measure
from rope_ext_hf.runs.conclusions.statistics import Estimate
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.runs.folder.identity import results_of_model
from rope_ext_hf.runs.folder.model_digest import model_digest
from rope_ext_hf.runs.run import Run
from rope_ext_hf.terminal import as_wide_as
from rope_ext_hf.tools.engines.base import list_engines
from rope_ext_hf.tools.engines.target import Target
from rope_ext_hf.tools.gguf.models import is_gguf, way_out
from rope_ext_hf.tools.serving.configs import Model, configure, make_target, open_model

CARD = "README.md"
RESULTS = ".eval_results"
_BEGIN, _MEASURED, _END = (f"<!-- rope-ext: {part} -->" for part in ("card", "measured", "end of the card"))
_ORIGIN = re.compile(r"^The weights come from .*\. (?=Written by )", re.MULTILINE)
_MOST_BYTES = 2**20  # of a card
CARD_COLUMNS = 100
"""The width of commands in a card."""
_LICENCES = ("license", "licence", "notice", "copying", "use_policy")  # beginnings of the names of licence files
_ROWS = ("method", "over", "context length", "extended length", "saved as", "published", "short inputs", "note")
"""The rows of `describe` that the card has."""


def made_from(model: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return keyword arguments of `write_card` that name the model a folder was made from.

    If it is on the Hub, it is downloaded.
    """
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
        folder: the folder of a model or an adapter, patched or not.
        runs: runs of this model, or of its source with the method that it carries. A run that is given by its folder
            must have measured these weights; they are read to check that. Without runs, the results that the card has
            stay.
        name: the name of the model in the card and its commands; default: the folder's name.
        source: the folder of the model that it was made from, whose card and licence are kept; default: the card in
            `folder` is continued.
        base_model: the Hub id of that model; default: the one that the card states.
        about: lines on how it was made; they stay in the card, as the text of the source does.
        trust_remote_code: whether the Python code that comes with the model may run.
        model: the patched model that the folder was just written from; default: it is loaded, without weights.

    Returns:
        The path of the card.

    Raises:
        FileError: a card whose metadata cannot be read, a run of another model or method, or an error of the disk. If
            the card of the source cannot be read, that is a warning, and its metadata are lost.
        CheckpointError: no such model, or it is a GGUF file.
    """
    from huggingface_hub import ModelCard, ModelCardData

    if is_gguf(folder):
        raise CheckpointError(f"a card stands in a folder, and {str(folder)!r} is a GGUF file. {way_out(Path(folder))}")
    file, folder = Path(folder) / CARD, Path(folder).resolve()
    name = name or folder.name
    card_folder = folder if source is None else Path(source)
    card = _read_card(card_folder, own=source is None)
    model = model or load_empty(folder, trust_remote_code=trust_remote_code)
    checked = list(_checked(folder, model, runs, trust_remote_code=trust_remote_code))
    measured = "".join([_measured_text(run, key) for run, key in checked]) or card.measured
    values = _new_metadata(card.values, model, base_model, is_adapter=is_adapter(folder))
    source_name = base_model or (source and card_folder.name)
    origin = f"The weights come from {_plain(source_name)}. " if source_name else card.origin
    rows = [(key, text) for key, text in describe(model).rows if key in _ROWS]
    rows.append(("fingerprint", f"{fingerprint(model).digest}, by `rope_ext_hf.fingerprint`"))
    sections = [
        f"# {_plain(name)}\n\n{origin}Written by rope_ext_hf {__version__}.",
        _table([("RoPE", "of this model"), *rows]),
        f"## How to load it\n\n{_loading(folder, model, name)}",
        *_serving(folder, name, trust_remote_code=trust_remote_code),
    ]
    written = "\n\n".join(sections)
    about_section = f"\n## How it was made\n\n{_code(about)}\n" if about else ""
    head = ModelCardData(**values).to_yaml(original_order=list(values))
    with disk_errors(folder):
        if source is not None:
            _copy_licences(card_folder, folder)
        if checked:
            _write_results(folder / RESULTS, checked)
    own_part = f"{_BEGIN}\n{written}\n{_MEASURED}{measured}{_END}"
    content = f"---\n{head.strip()}\n---\n\n{own_part}\n{about_section}{card.text}"
    return write_text(file, str(ModelCard(content)))


def _new_metadata(values: dict[str, Any], model: Any, base_model: str | None, *, is_adapter: bool) -> dict[str, Any]:
    """Return the metadata of a card with the tags, the library and the base model of a patched model."""
    tags: list[Any] = values["tags"] if isinstance(values.get("tags"), list) else []
    own_tags = ["rope", "long-context", *[patch.method.name for patch in active_patches(model)[-1:]]]
    new = dict(values)
    new["tags"] = [*tags, *[tag for tag in own_tags if tag not in tags]]
    new.setdefault("library_name", "peft" if is_adapter else "transformers")
    if base_model is not None:
        new |= {"base_model": base_model, "base_model_relation": "adapter" if is_adapter else "finetune"}
    return new


def _copy_licences(source: Path, folder: Path) -> None:
    """Copy the licence files of a model that the folder does not have."""
    for file in list_files(source):
        if file.lower().startswith(_LICENCES) and not (folder / file).exists():
            shutil.copyfile(resolve_inside(source, file), folder / file)


# --- the card that exists ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Card:
    """The parts of an existing model card that are kept when the card is written again."""

    values: dict[str, Any] = field(default_factory=dict)  # the metadata
    text: str = ""  # the author's text
    origin: str = ""  # the sentence on the source that was written here
    measured: str = ""  # the results that were written here


def _read_card(folder: Path, *, own: bool) -> _Card:
    """Read the parts to keep from the card in a folder.

    With `own` it is the card of the model itself. Else it is that of the model it was made from: the results are left
    out, because they are another model's, and metadata that cannot be read are a warning instead of an error.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if not (folder / CARD).exists():
        return _Card()
    file = resolve_inside(folder, CARD)
    with disk_errors(file):
        if file.stat().st_size > _MOST_BYTES:
            raise FileError(f"{str(file)!r} has more than {_MOST_BYTES:,} bytes, which no card needs")
        content = file.read_bytes().decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    head = REGEX_YAML_BLOCK.search(content)
    text = content[head.end() :] if head else content
    origin = measured = ""
    values: dict[str, Any] = {}
    try:
        if head is not None:
            values = _metadata(head[2])
        elif content.startswith("---\n"):
            raise ValueError("the line --- at their end is missing")
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        problem = getattr(error, "problem", None) or one_line(error)
        sentence = f"the metadata at the beginning of {str(file)!r} cannot be read: {problem}"
        if own:
            raise FileError(f"{sentence}; correct them, or remove the file") from error
        warnings.warn(f"{sentence}; the new card is without them, and without a licence", stacklevel=3)
    if not own:
        values.pop("model-index", None)
    before, begins, rest = text.partition(_BEGIN)
    if begins and not before.strip():
        written, _, text = rest.partition(f"{_END}\n")
        if own:
            written, _, measured = written.partition(_MEASURED)
            origin = "".join(_ORIGIN.findall(written)[:1])
    return _Card(values, text, origin, measured)


def _metadata(text: str) -> dict[str, Any]:
    """Return the YAML metadata at the beginning of a card's text.

    Raises:
        ValueError: they are not metadata of a card.
    """
    from huggingface_hub import ModelCardData

    values = yaml.load(text, Loader=PlainLoader) or {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError("they must be a YAML mapping, with lines such as `license: apache-2.0`")
    for key in values:
        if hasattr(ModelCardData, key):
            raise ValueError(f"{short(key)!r} is not a name that metadata may have")
    ModelCardData(**values)
    return values


# --- how to load and serve it -----------------------------------------------------------------------------------------


def _loading(folder: Path, model: Any, name: str) -> str:
    """Return code that loads the model: with plain transformers if that computes the same, else with this package."""
    import transformers

    state, with_code = patch_state(model), (folder / "modeling_rope_ext_hf.py").is_file()
    needs_package = "It needs the package `rope_ext_hf`.\n\n"
    loads_plainly = with_code or state is None or state.encoding.loads_plainly
    if is_adapter(folder) or not loads_plainly:
        code = f"import rope_ext_hf as rope\n\nmodel = rope.from_pretrained({json.dumps(name)})"
        return needs_package + _code(code, "python")
    loader = type(model).__name__
    for auto_class in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"):
        if type(model.config) in getattr(transformers, auto_class)._model_mapping:
            loader = auto_class
            break
    more = ", trust_remote_code=True" if with_code else ""
    code = f"from transformers import {loader}\n\nmodel = {loader}.from_pretrained({json.dumps(name)}{more})"
    return (needs_package if with_code else "") + _code(code, "python")


def _serving(folder: Path, name: str, **trust: Any) -> Iterator[str]:
    """Yield the lines of the card on serving: the output of `serve-config` for each engine, the usual server first.

    The other engines are folded, so that a click opens them.
    """
    shown: list[tuple[str, str]] = []
    refused: dict[str, list[str]] = {}

    # opened inside the loop, where an error is one of the reasons of an engine
    @cache
    def opened() -> Model:
        model = open_model(folder, **trust)
        model.name = name
        return model

    @cache
    def target() -> Target:
        return make_target(opened())

    servers = [cls() for cls in list_engines().values() if not cls.reference]
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
        if number == 0:
            yield f"{engine_label}:\n\n{block}"
        else:
            yield f"<details><summary>{engine_label}</summary>\n\n{block}\n\n</details>"
    for reason, labels in refused.items():
        yield f"Not by {', '.join(labels)}: {_plain(reason)}"


# --- the results of runs --------------------------------------------------------------------------------------------


def _checked(
    folder: Path, model: Any, runs: Iterable[Run[Any] | str | Path], **trust: Any
) -> Iterator[tuple[Run[Any], str]]:
    """Yield each run, reduced to the results of this model and its unpatched source, with the key of its method.

    Raises:
        FileError: a run of other weights, or without this method on this rotary embedding.
    """

    @cache
    def digest(dtype: str) -> str:
        return model_digest(load_model(folder, dtype=dtype, **trust))

    for source in runs:
        run = source if isinstance(source, Run) else read_run(source)
        if not isinstance(source, Run):  # a run in memory has just measured these weights
            dtype = run.settings["dtype"] if run.settings["dtype"] in ("float32", "bfloat16", "float16") else "auto"
            if digest(dtype) != run.settings.get("weights"):
                raise FileError(f"the run in {str(run.path)!r} measured other weights than those in {str(folder)!r}")
        chosen, method = results_of_model(run, model, repr(str(folder)))
        yield chosen, method_key(method)


def _shown(measure: Measure, key: str, length: int) -> tuple[Estimate, str]:
    """Return the value to publish with its confidence interval, and both as text."""
    value = measure.estimate(key, length)
    return value, value.text(measure.text)


def _measured_text(run: Run[Any], key: str) -> str:
    """Return the section of the card on one run: its conclusion, and a table for each measure."""
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
    setting = (
        f"{run.kind.counted_items(len(settings['items']))}, in {settings['dtype']} on {settings['device']}; {versions}."
    )
    return "\n\n".join([*parts, f"{_plain(setting)}\n\n"])


def _data_name(run: Run[Any]) -> str:
    """Return the name of the text that a run was measured on: a dataset of the Hub, or the last part of a path."""
    data = printable(str(run.settings["data"]))
    return data if data.startswith("hf:") else data.rpartition("/")[2] or data


def _write_results(folder: Path, runs: Iterable[tuple[Run[Any], str]]) -> None:
    """Write one YAML file of results for each run into .eval_results, in place of those that were written before."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    folder.mkdir(exist_ok=True)
    for old in folder.glob("rope-ext-*.yaml"):
        old.unlink()
    for number, (run, key) in enumerate(runs, 1):
        data, entries = _data_name(run), []
        dataset = f"text:{data}"  # a name that no dataset of the Hub can have
        if data.startswith("hf:"):
            dataset = data.removeprefix("hf:").partition("?")[0]
        for measure in run.findings.ordered:
            for length in measure.lengths(key):
                value, text = _shown(measure, key, length)
                if math.isfinite(value.value):
                    name = measure.name.replace(" ", "_")
                    notes = f"{run.findings.names[key]}, {text} over {value.items} items; rope-ext-hf {__version__}"
                    entries.append(EvalResultEntry(dataset, f"{name}_{length}", round(value.value, 6), notes=notes))
        text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
        write_text(folder / f"rope-ext-{run.kind.name.replace(' ', '-')}-{number}.yaml", text)


# --- Markdown ---------------------------------------------------------------------------------------------------------


def _plain(text: str) -> str:
    """Return text escaped for Markdown, so that it starts no HTML, no table and no comment like this module's."""
    return html.escape(printable(text), quote=False).replace("|", "\\|").replace("\n", " ")


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table; the first row is the head."""
    head, *others = [f"| {' | '.join(map(_plain, row))} |" for row in rows]
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *others])


def _code(text: str, language: str = "") -> str:
    """Return text as a Markdown code block, whose fence has more backticks than the text has in a row."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.strip()}\n{fence}"

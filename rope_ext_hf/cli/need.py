"""`need`: whether a model needs a longer context at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rope_ext_hf.bounds import MOST_TOKENS
from rope_ext_hf.cli.console import make_folder, print_note, print_text, quiet_transformers
from rope_ext_hf.cli.evaluation import shown_progress
from rope_ext_hf.cli.options import EvalOptions, Json, Model
from rope_ext_hf.errors import FileError
from rope_ext_hf.eval.questions import Need
from rope_ext_hf.files import json_text, read_json, write_json
from rope_ext_hf.questions import asked, command_line

if TYPE_CHECKING:
    from rope_ext_hf.eval.need_verdicts import NeedReport

_NEED_FILE = "need.json"  # the name of the file that a run leaves in its folder


def need(
    model: Model,
    load: EvalOptions,
    question: Need,
    out: Path | None = asked(
        None,
        "Where the result is kept; the same command continues there. Default: a folder of this model's own in "
        "rope-ext-results.",
        metavar="FOLDER",
    ),
    as_json: Json = False,
) -> None:
    """Find out whether a model needs extending, how far it reads as it is, and what in its architecture says so.

    A short fixed plan: the loss of the same tokens at growing lengths, and answers hidden in text. `rope-ext advise`
    takes what it leaves in --out FOLDER by its option --need FOLDER.

    Example: `rope-ext need reference --target-length 512`
    """
    from rope_ext_hf.eval.needs import need as find_need
    from rope_ext_hf.hub import foreign_errors, source_digest
    from rope_ext_hf.runs.run_file import run_file
    from rope_ext_hf.runs.workers import Workers

    digest = source_digest(model, revision=load.revision)
    out = out or Path("rope-ext-results") / f"need-{Path(model).name or 'model'}-{digest[:10]}"
    make_folder(out)
    quiet_transformers()
    with foreign_errors(f"the model {model!r} could not be measured"):
        found = find_need(
            load.model(model),
            question.data,
            target_length=question.target_length,
            tokenizer=load.tokenizer(model),
            out=out,
            chunk=load.tokens_per_pass,
            report=lambda line: print_note("need", line),
            progress=shown_progress(Workers()),
            file=run_file(question, model, load, out=out),
        )
    record = {"model": model, "digest": digest} | found.to_dict() | {"command": _next_command(found, model, out)}
    write_json(out / _NEED_FILE, record)
    print_text(json_text(record) if as_json else f"{found}\n  {record['command']}".rstrip())


def _next_command(found: NeedReport, model: str, out: Path) -> str:
    """The command that follows from what was found; none where every layer's window is too narrow."""
    from rope_ext_hf.runs.verdicts import Outcome

    short, goal, text = found.context_length, found.goal, "texts/*.txt"
    lengths = sorted({short, goal})
    match found.outcome:
        case _ if found.too_narrow:
            return ""
        case Outcome.WORSE:
            need = out if (found.reads_to or 0) > short else None
            return command_line("advise", model, target_length=goal, need=need)
        case Outcome.NO_MEASURE:
            return command_line("ppl", model, lengths=lengths, keys_by=model, data=text)
        case Outcome.BETTER if found.target_length:
            return command_line("ppl", model, lengths=lengths, data=text)
        case outcome:
            longer = 2 * goal if outcome is Outcome.BETTER else goal
            return command_line("need", model, target_length=longer, data=text)


def reach_in(folder: Path, model: str, *, revision: str | None = None) -> int | None:
    """The tokens up to which a model reads as it is, by what `need` left in a folder; None: it is not known."""
    from rope_ext_hf.hub import source_digest

    found, file = read_json(folder / _NEED_FILE), repr(str(folder / _NEED_FILE))
    if found.get("digest") != source_digest(model, revision=revision):
        raise FileError(f"{file} was not measured of {model!r} as it is now; run {command_line('need', model)}")
    reach, lengths = found.get("reads_to"), found.get("lengths")
    if reach is not None and not (type(reach) is int and 1 <= reach <= MOST_TOKENS and reach in (lengths or ())):
        raise FileError(f"{file} states no length that a model reads to; run {command_line('need', model)} again")
    return reach

"""The command `check-server`: does a running server compute what was measured?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.bounds import parse_lengths
from rope_ext_hf.cli.console import print_text, progress_bar
from rope_ext_hf.cli.options import Json, LoadOptions, command
from rope_ext_hf.errors import MethodError
from rope_ext_hf.files import json_text
from rope_ext_hf.questions import asked

if TYPE_CHECKING:
    from rope_ext_hf.tools.servers.answers import BaselineReport
    from rope_ext_hf.tools.servers.checking import ServerReport


@command("Tool box: serve")
def check_server(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address, e.g. http://localhost:8000.")],
    load: LoadOptions,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The folder or Hub id that was measured; not needed with a record."),
    ] = None,
    lengths: str | None = asked(
        None,
        "Of prompts. Default: half the context length, to the extended length or ten minutes each.",
        metavar="LENGTHS",
    ),
    data: str = asked("stdlib", "What prompts are cut from, as for ppl.", metavar="TEXT"),
    served_name: str | None = asked(
        None, "What the server calls the model. Default: the first it lists.", metavar="NAME"
    ),
    seconds: float = asked(300.0, "That an answer may take.", least=1.0),
    weight_bits: int = asked(
        8, "Of the weights on the server: how much rounding is allowed.", least=2, most=32, metavar="N"
    ),
    kv_bits: int = asked(16, "Of keys and values on the server: 16, 8 or 4.", metavar="N"),
    strict: bool = asked(False, "Ask until an error of 1% of the softmax scale would show."),
    record: Path | None = asked(None, "Write what the server answers there; reads no weights.", metavar="FILE"),
    against: Path | None = asked(None, "Say what changed since --record wrote this; reads no weights.", metavar="FILE"),
    from_file: Path | None = asked(None, "Compare what --record wrote; the address is not asked.", metavar="FILE"),
    as_json: Json = False,
) -> None:
    """Say whether a running server computes what was measured, or which mistake it runs; exit code 1 if it does not.

    Of vLLM, SGLang, llama.cpp, or a program with OpenAI's completions that gives log-probabilities of prompts. The
    model is loaded here too. With --record, and later --against, it is compared with itself, and no model is needed.
    An API key is taken from the variable ROPE_EXT_API_KEY.

    Example: `rope-ext check-server http://localhost:8000 my-model-yarn`
    """
    from rope_ext_hf.tools.servers.answers import compare_server, record_server
    from rope_ext_hf.tools.servers.checking import check_server as check

    if sum(file is not None for file in (record, against, from_file)) > 1:
        raise MethodError("--record, --against and --from-file exclude each other; give one of them")
    reached: dict[str, Any] = {"served_name": served_name, "seconds": seconds, **load.version}
    asked: dict[str, Any] = {"lengths": parse_lengths(lengths) if lengths else None, "data": data}
    report: ServerReport | BaselineReport
    if record is not None:
        record_server(url, record, model, **asked, **reached)
        print_text(json_text({"written": str(record)}) if as_json else f"written to {record}")
        return
    if against is not None:
        report = compare_server(url, against, model, **reached)
    elif model is None:
        raise MethodError(
            "give the model that was measured: rope-ext check-server URL MODEL; or --record, or --against"
        )
    else:
        dtype = "float32" if load.dtype == "auto" else load.dtype
        asked |= {"device": load.device, "weight_bits": weight_bits, "kv_bits": kv_bits, "strict": strict}
        with progress_bar("comparing") as bar:
            report = check(url, model, dtype=dtype, progress=bar.set, from_file=from_file, **asked, **reached)
    print_text(json_text(report.to_dict()) if as_json else str(report))
    if not report.agrees:
        raise typer.Exit(1)

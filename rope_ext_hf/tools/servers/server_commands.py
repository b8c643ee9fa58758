"""The command `check-server`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.bounds import parse_lengths
from rope_ext_hf.cli.console import print_result, print_text, progress_bar
from rope_ext_hf.cli.options import Json, LoadOptions, command
from rope_ext_hf.errors import MethodError
from rope_ext_hf.files.whole import json_text
from rope_ext_hf.options.arguments import argument

if TYPE_CHECKING:
    from rope_ext_hf.tools.servers.baselines import BaselineReport
    from rope_ext_hf.tools.servers.server_report import ServerReport


@command("Tool box: serve")
def check_server(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address, e.g. http://localhost:8000.")],
    load: LoadOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="The folder or Hub id that was measured; optional with --record and --against."
        ),
    ] = None,
    lengths: str | None = argument(
        None,
        "Lengths of the prompts in tokens. Default: from half the context length up to the extended length, without "
        "those that would take more than ten minutes to compute here.",
        metavar="LENGTHS",
    ),
    data: str = argument(
        "stdlib", "The text that prompts are cut from, in any form that --data of ppl takes.", metavar="TEXT"
    ),
    served_name: str | None = argument(
        None, "The model's name on the server. Default: the first one that it lists.", metavar="NAME"
    ),
    seconds: float = argument(300.0, "Time limit of one answer, in seconds.", least=1.0),
    weight_bits: int = argument(
        8,
        "Bits of a weight on the server; rounding to coarser weights is not allowed for.",
        least=2,
        most=32,
        metavar="N",
    ),
    kv_bits: int = argument(16, "Bits of keys and values on the server: 16, 8 or 4.", metavar="N"),
    strict: bool = argument(False, "Send more prompts, until an error of 1% of the softmax scale would be noticed."),
    record: Path | None = argument(
        None, "Write the server's answers to this file and read no weights.", metavar="FILE"
    ),
    against: Path | None = argument(
        None, "Compare with the answers in this file of --record and read no weights.", metavar="FILE"
    ),
    from_file: Path | None = argument(
        None, "Compare the answers in this file of --record with the model, without asking the server.", metavar="FILE"
    ),
    as_json: Json = False,
) -> None:
    """Check that a running server computes what was measured.

    If it does not, the exit code is 1, and the mistake is named if it is a common one. The server is vLLM, SGLang,
    llama.cpp, or a program with OpenAI's completions API that returns log-probabilities of the prompt. The model is
    loaded here too. With --record, and later --against, the server is compared with its own earlier answers, and no
    model is loaded. An API key is taken from the environment variable ROPE_EXT_API_KEY.

    Example: `rope-ext check-server http://localhost:8000 my-model-yarn`
    """
    from rope_ext_hf.tools.servers.baselines import compare_server, record_server
    from rope_ext_hf.tools.servers.checking import check_server as check

    if sum(file is not None for file in (record, against, from_file)) > 1:
        raise MethodError("--record, --against and --from-file exclude each other; give one of them")
    server: dict[str, Any] = {"served_name": served_name, "seconds": seconds, **load.version}
    prompts: dict[str, Any] = {"lengths": parse_lengths(lengths) if lengths else None, "data": data}
    report: ServerReport | BaselineReport
    if record is not None:
        record_server(url, record, model, **prompts, **server)
        print_text(json_text({"written": str(record)}) if as_json else f"written to {record}")
        return
    if against is not None:
        report = compare_server(url, against, model, **server)
    elif model is None:
        raise MethodError(
            "give the model that was measured (rope-ext check-server URL MODEL), or --record FILE or --against FILE"
        )
    else:
        with progress_bar("comparing") as bar:
            report = check(
                url,
                model,
                dtype="float32" if load.dtype == "auto" else load.dtype,
                device=load.device,
                weight_bits=weight_bits,
                kv_bits=kv_bits,
                strict=strict,
                from_file=from_file,
                progress=bar.set,
                **prompts,
                **server,
            )
    print_result(report, as_json)
    if not report.agrees:
        raise typer.Exit(1)

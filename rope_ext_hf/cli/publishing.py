"""The command `card`, and the options of all commands that write a model's folder by which it goes to the Hub."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rope_ext_hf.cli.console import print_note, print_text, quiet_transformers
from rope_ext_hf.cli.options import Json
from rope_ext_hf.errors import MethodError, size_text
from rope_ext_hf.files import json_text, list_files
from rope_ext_hf.questions import Question, asked, command_line


@dataclass(frozen=True, kw_only=True)
class PublishOptions(Question):
    """Whether the folder that a command writes is uploaded."""

    push_to_hub: str | None = asked(
        None, "Also upload the folder to the Hugging Face Hub, after asking; private.", metavar="OWNER/NAME"
    )
    public: bool = asked(False, "Make the uploaded repository public.")
    yes: bool = asked(False, "Do not ask.", names=("--yes", "-y"))

    def check(self) -> None:
        """Refuse, before any work, what would stop the upload."""
        from rope_ext_hf.downloads import check_upload

        if self.push_to_hub is None:
            if self.public:
                raise MethodError("--public says how --push-to-hub uploads; give that as well")
            return
        if not (self.yes or sys.stdin.isatty()):
            raise MethodError("nobody can be asked here whether to upload; give --yes")
        check_upload(self.push_to_hub, private=not self.public)

    def upload(self, folder: Path, *, trust_remote_code: bool) -> None:
        """Upload a folder under the name asked for, which its card gets; what goes is printed, and asked about."""
        if self.push_to_hub is None:
            return
        from rope_ext_hf.downloads import upload
        from rope_ext_hf.serving.model_card import write_card

        write_card(folder, name=self.push_to_hub, trust_remote_code=trust_remote_code)
        sizes = {name: (folder / name).stat().st_size for name in list_files(folder)}
        kind = "public" if self.public else "private"
        print_note("upload", f"{size_text(sum(sizes.values()))} to the {kind} repository {self.push_to_hub}:")
        for name, size in sizes.items():
            print_note("", f"{name}, {size_text(size)}{_paths_in(folder / name)}")
        if not (self.yes or typer.confirm("Upload?", default=False, err=True)):
            later = command_line("card", folder, push_to_hub=self.push_to_hub, public=self.public)
            print_note("upload", f"not done; `{later}` does it")
            return
        print_note("uploaded", upload(folder, self.push_to_hub, private=not self.public))


def _paths_in(file: Path) -> str:
    """Which paths of this machine a run file, a card or a config names, in words."""
    text = file.read_text("utf-8", errors="replace") if file.name.endswith((".yaml", ".md", "config.json")) else ""
    found = dict.fromkeys(re.findall(r"(?<![\w./:-])(?:[A-Z]:)?[/\\][^\s\"'`,;:)}\]]+", text))
    named = [each for each in found if len(Path(each).parts) > 2 and Path(each).parents[-2].is_dir()]
    return f"; it names {', '.join(named)}" if named else ""


def card(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a model or an adapter.")],
    publish: PublishOptions,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Folders of runs that measured it. Default: those in its card stay."),
    ] = None,
    base_model: str | None = asked(None, "The model on the Hub that it was made from.", metavar="OWNER/NAME"),
    trust_remote_code: bool = asked(False, "Run the Python code that comes with the model."),
    as_json: Json = False,
) -> None:
    """Write the model card of a folder: how it is loaded and served, and the results of runs by length.

    The text of the card that is there stays, with its licence and tags. Results also go into FOLDER/.eval_results, as
    the Hugging Face Hub reads them. A run that is given is checked to be of these weights and this method.

    Example: `rope-ext card longer rope-ext-results/longer-perplexity-0123456789`
    """
    from rope_ext_hf.serving.model_card import RESULTS, write_card

    publish.check()
    quiet_transformers()
    written = write_card(folder, runs or (), base_model=base_model, trust_remote_code=trust_remote_code)
    files = [written, *sorted((folder / RESULTS).glob("*.yaml"))]
    print_text(
        json_text([str(file) for file in files]) if as_json else "\n".join(f"written to {file}" for file in files)
    )
    publish.upload(folder, trust_remote_code=trust_remote_code)

"""Publishing a folder that a command has written: its model card, and its upload to the Hugging Face Hub."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from rope_ext_hf.cli.console import print_note
from rope_ext_hf.errors import MethodError, size_text
from rope_ext_hf.files import list_files
from rope_ext_hf.plug_ins import plug_ins
from rope_ext_hf.questions import Question, argument, command_line


@dataclass(frozen=True, kw_only=True)
class PublishOptions(Question):
    """Options for uploading the folder that a command writes to a repository on the Hugging Face Hub."""

    push_to_hub: str | None = argument(
        None, "Also upload the folder to the Hugging Face Hub, after asking; private.", metavar="OWNER/NAME"
    )
    public: bool = argument(False, "Make the uploaded repository public.")
    yes: bool = argument(False, "Do not ask.", names=("--yes", "-y"))

    def check(self) -> None:
        """Raise any error that would stop the upload later, before other work is done."""
        from rope_ext_hf.downloads import check_upload

        if self.push_to_hub is None:
            if self.public:
                raise MethodError("--public is for an upload; give --push-to-hub OWNER/NAME as well")
            return
        if not (self.yes or sys.stdin.isatty()):
            raise MethodError("nobody can be asked here whether to upload; give --yes")
        check_upload(self.push_to_hub, private=not self.public)

    def upload(self, folder: Path, *, trust_remote_code: bool) -> None:
        """Upload a folder to the chosen repository, if any, after listing its files and asking the user.

        The model card is written again first, with the name of the repository.
        """
        if self.push_to_hub is None:
            return
        from rope_ext_hf.downloads import upload

        write_cards(folder, name=self.push_to_hub, trust_remote_code=trust_remote_code)
        sizes = {name: (folder / name).stat().st_size for name in list_files(folder)}
        visibility = "public" if self.public else "private"
        print_note("upload", f"{size_text(sum(sizes.values()))} to the {visibility} repository {self.push_to_hub}:")
        for name, size in sizes.items():
            print_note("", f"{name}, {size_text(size)}{_local_paths_note(folder / name)}")
        if not (self.yes or typer.confirm("Upload?", default=False, err=True)):
            later = command_line("card", folder, push_to_hub=self.push_to_hub, public=self.public)
            print_note("upload", f"not done; to upload later, type `{later}`")
            return
        print_note("uploaded", upload(folder, self.push_to_hub, private=not self.public))


def write_cards(folder: Path, **arguments: Any) -> None:
    """Write the model card of a folder with every plug-in in the group rope_ext_hf.cards; `arguments` go to each."""
    for write in plug_ins("cards").values():
        write(folder, **arguments)


def _local_paths_note(file: Path) -> str:
    """Return a clause that lists paths of this machine in a run file, model card or config; empty if there are none.

    The user sees it before the upload, and may not want to publish such paths.
    """
    if not file.name.endswith((".yaml", ".md", "config.json")):
        return ""
    text = file.read_text("utf-8", errors="replace")
    candidates = dict.fromkeys(re.findall(r"(?<![\w./:-])(?:[A-Z]:)?[/\\][^\s\"'`,;:)}\]]+", text))
    # a path of at least two folders, of which the first exists here, and not a word such as "/s" in tokens/s
    paths = [path for path in candidates if len(Path(path).parts) > 2 and Path(path).parents[-2].is_dir()]
    return f"; it contains paths of this machine: {', '.join(paths)}" if paths else ""

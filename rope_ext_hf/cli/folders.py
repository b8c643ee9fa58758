"""Folders that commands write: a patched copy of a model, its model card, and its upload to the Hugging Face Hub.

torch is imported inside the functions, so that --help answers at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rope_ext_hf.cli.console import print_note, progress_bar
from rope_ext_hf.cli.options import SourceOptions
from rope_ext_hf.errors import MethodError, capital, short, size_text
from rope_ext_hf.files.whole import list_files
from rope_ext_hf.options.arguments import Options, argument, command_line
from rope_ext_hf.options.method_choice import LayerChoice
from rope_ext_hf.plug_ins import plug_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.patches.describing import Description
    from rope_ext_hf.runs.run import Run

__all__ = ["PublishOptions", "write_patched"]


def write_patched(
    model: str,
    out: Path,
    methods: LayerChoice,
    source: SourceOptions,
    *,
    native: bool = False,
    as_code: bool = False,
    keep_mistral_format: bool = False,
    force: bool = False,
    runs: Sequence[Run[Any]] = (),
) -> Description:
    """Write a patched copy of a model folder, and return a description of it.

    The model card in it shows the results of `runs`. The other arguments are those of the command `patch`.
    """
    from rope_ext_hf.checkpoints.folder_copies import save_patched_folder
    from rope_ext_hf.files.model_folders import folder_and_hub_id
    from rope_ext_hf.files.whole import foreign_errors, mistral_format_files
    from rope_ext_hf.models.patch_records import replaced_note
    from rope_ext_hf.patches.slots.patched_slot import active_patches
    from rope_ext_hf.runs.chosen_methods import apply_choice

    empty = source.empty_model(model)
    with foreign_errors(f"the model {short(model)!r} could not be patched"):
        recorded = active_patches(empty)
        apply_choice(methods, empty, native=native)
        folder, hub_id = folder_and_hub_id(model, revision=source.revision)
        finish = partial(
            _write_card,
            runs=runs,
            name=out.name,
            source=folder,
            base_model=hub_id,
            model=empty,
            trust_remote_code=source.trust_remote_code,
        )
        with progress_bar("copying", unit="bytes") as bar:
            save_patched_folder(
                empty, folder, out, bar.set, as_code, finish, keep_mistral_format, name=hub_id, force=force
            )
        description = described(empty, model, source)
        replaced = replaced_note(recorded, active_patches(empty)[-1], over="--over patched")
        if replaced is not None and len(active_patches(empty)) == 1:
            description = replace(description, notes=(*description.notes, f"{capital(replaced)}."))
        names = ", ".join(mistral_format_files(folder))
        if not names:
            return description
        if keep_mistral_format:
            note = (
                f"{names} are copied as they are: start vLLM with --config-format hf --load-format safetensors, or it "
                "runs the model from them, without the method."
            )
        else:
            note = (
                f"{names} are left out: they hold the model in Mistral's own format, from which vLLM would run it "
                "without the method. --keep-mistral-format copies them too."
            )
        return replace(description, notes=(*description.notes, note))


def described(empty: PreTrainedModel, name: str, source: SourceOptions) -> Description:
    """Describe a model; notes add facts about its folder, `name`, that the model object does not show."""
    from rope_ext_hf.files.model_files import model_file
    from rope_ext_hf.files.model_folders import model_folder
    from rope_ext_hf.files.whole import read_json
    from rope_ext_hf.hub import is_adapter
    from rope_ext_hf.models.config_keys import text_settings, unread_settings
    from rope_ext_hf.patches.describing import describe as describe_model
    from rope_ext_hf.patches.saved.adapters import SAVE_ROUTE

    description = describe_model(empty)
    file = model_file(name)
    if file is not None:
        return replace(description, save_route=f"not as it is: {file.way_out}")
    config = model_folder(name, revision=source.revision, weights=False) / "config.json"
    if config.is_file():  # the folder of an adapter has none
        note = unread_settings(text_settings(read_json(config)))
        if note and note not in description.notes:  # `describe_model` reads local folders itself
            description = replace(description, notes=(*description.notes, note))
    if description.patched and is_adapter(name, revision=source.revision):
        return replace(description, save_route=SAVE_ROUTE)
    return description


@dataclass(frozen=True, kw_only=True)
class PublishOptions(Options):
    """Options for uploading the folder that a command writes to a repository on the Hugging Face Hub."""

    push_to_hub: str | None = argument(
        None, "Also upload the folder to the Hugging Face Hub, after asking; private.", metavar="OWNER/NAME"
    )
    public: bool = argument(False, "Make the uploaded repository public.")
    yes: bool = argument(False, "Do not ask.", names=("--yes", "-y"))

    def check(self) -> None:
        """Raise any error that would stop the upload later, before other work is done."""
        from rope_ext_hf.files.downloads import check_upload

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
        from rope_ext_hf.files.downloads import upload

        _write_card(folder, name=self.push_to_hub, trust_remote_code=trust_remote_code)
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


def _write_card(folder: Path, **arguments: Any) -> None:
    """Write the model card of a folder with the tool box, if that is installed; `arguments` go to its function."""
    write = plug_in("parts", "card")
    if write is not None:
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

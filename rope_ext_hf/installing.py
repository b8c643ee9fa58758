"""How to install this package again, with one of its extras: from where it came.

    install_command("eval")        # pip install '/home/me/rope_ext_hf[eval]', for a package installed from that folder

A name that an index does not have yet can be taken by anybody, whose code `pip install` would then run: it stands alone
in a command only where the installed package itself came from an index.
"""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "rope-ext-hf"


def install_command(extra: str = "", *options: str) -> str:
    """The pip command that installs this package, with an extra, from where the running one came from (PEP 610)."""
    return " ".join(["pip install", *options, *_source(f"[{extra}]" if extra else "")])


def _source(extra: str) -> list[str]:
    origin, from_index = {}, False
    with suppress(metadata.PackageNotFoundError, ValueError):  # a copy of the files alone; a damaged note
        noted = metadata.distribution(NAME).read_text("direct_url.json")
        origin, from_index = json.loads(noted or "{}"), not noted  # an index goes unnoted
    url = origin.get("url", "")
    checkout = Path(__file__).parent.parent
    if (checkout / "pyproject.toml").is_file():  # editable, or on the path without being installed
        editable = ["-e"] if origin.get("dir_info", {}).get("editable") else []
        return [*editable, shlex.quote(f"{checkout}{extra}")]
    if "dir_info" in origin:
        return [shlex.quote(url2pathname(urlsplit(url).path) + extra)]
    if version := origin.get("vcs_info"):
        return [shlex.quote(f"{NAME}{extra} @ {version['vcs']}+{url}@{version['commit_id']}")]
    if url:
        return [shlex.quote(f"{NAME}{extra} @ {url}")]
    return [shlex.quote(NAME + extra if from_index else f"CHECKOUT{extra}")]

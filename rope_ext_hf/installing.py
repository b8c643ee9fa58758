"""The pip command that installs this package again, with one of its extras, from the place it came from.

    install_command("eval")        # pip install '/home/me/rope_ext_hf[eval]', for a package installed from that folder

Anybody can register a name that an index does not have yet, and `pip install NAME` would then run their code. So the
command has the bare name only where the installed package itself came from an index.
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
    """Return the pip command that installs this package with an extra and with further options of pip."""
    return " ".join(["pip install", *options, *_source(f"[{extra}]" if extra else "")])


def _source(extra: str) -> list[str]:
    """Return the arguments that make pip install this package, with an extra, from where pip got it (see PEP 610)."""
    origin, from_index = {}, False
    # Without a distribution these are bare files; the record may be damaged.
    with suppress(metadata.PackageNotFoundError, ValueError):
        record = metadata.distribution(NAME).read_text("direct_url.json")
        origin = json.loads(record or "{}")
        from_index = not record  # pip writes no record for a package from an index
    url = origin.get("url", "")
    checkout = Path(__file__).parent.parent
    if (checkout / "pyproject.toml").is_file():  # installed as editable, or on the path without being installed
        editable = ["-e"] if origin.get("dir_info", {}).get("editable") else []
        return [*editable, shlex.quote(f"{checkout}{extra}")]
    if "dir_info" in origin:
        return [shlex.quote(url2pathname(urlsplit(url).path) + extra)]
    if version := origin.get("vcs_info"):
        return [shlex.quote(f"{NAME}{extra} @ {version['vcs']}+{url}@{version['commit_id']}")]
    if url:
        return [shlex.quote(f"{NAME}{extra} @ {url}")]
    return [shlex.quote(NAME + extra if from_index else f"CHECKOUT{extra}")]

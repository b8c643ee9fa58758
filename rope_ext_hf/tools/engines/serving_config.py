"""`ServingConfig`: the command, config keys and GGUF tensors with which an engine serves a model with a RoPE method."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rope_ext_hf.errors import short
from rope_ext_hf.terminal import Rows, ShownAsTables, wrapped
from rope_ext_hf.tools.engines.keys import Computed


@dataclass(frozen=True, repr=False)
class ServingConfig(ShownAsTables):
    """The command, config keys and GGUF metadata with which an engine computes RoPE as it was measured here.

    As text it is a block to copy into a shell: everything but the command is a comment.

    Attributes:
        engine, version: the engine, and the version whose source its rules were taken from.
        encoding: "native" where the engine has the method under a name of its own, else how the frequencies are
            written.
        method: the name of the method, for messages.
        length: the length in tokens that is served.
        command: the command line, one word each.
        overrides: the JSON in the command line; None: the command needs none, or the engine takes none.
        config_keys: keys to write into config.json instead of the overrides, or where the engine takes none.
        gguf_keys: metadata to write into the GGUF file.
        gguf_tensors: float32 tensors to write into the GGUF file, by name.
        gguf_removed: tensors to leave out of the GGUF file, by name.
        computed: the frequencies, magnitude and length that the engine computes from this config.
        notes: further remarks, in sentences.
        by_folder: two commands that do the same with a patched folder, for which the engine needs no overrides; empty
            where this would not be shorter.
    """

    engine: str
    version: str
    encoding: str
    method: str
    length: int
    command: tuple[str, ...] = ()
    overrides: dict[str, Any] | None = None
    config_keys: dict[str, Any] = field(default_factory=dict)
    gguf_keys: dict[str, Any] = field(default_factory=dict)
    gguf_tensors: dict[str, tuple[float, ...]] = field(default_factory=dict)
    gguf_removed: tuple[str, ...] = ()
    computed: Computed | None = None
    notes: tuple[str, ...] = ()
    by_folder: tuple[str, ...] = field(default=(), compare=False)

    @property
    def _heading(self) -> str:
        return f"{self.method} at {self.length:,} tokens in {self.engine} {self.version} ({self.encoding})"

    @property
    def _command_text(self) -> str:
        """The command as text, with each option on a line of its own."""
        words = map(shlex.quote, self.command)
        return " ".join([f"\\\n  {word}" if word.startswith("--") else word for word in words])

    @property
    def _files(self) -> Rows:
        """Contents of the files to write, each under a title."""
        keys = self.config_keys if self.config_keys != self.overrides else {}
        tensors = [
            (f"GGUF tensor {name}, {len(values)} x float32", short(", ".join(map(str, values)), 60))
            for name, values in self.gguf_tensors.items()
        ]
        titled = [
            ("Shorter: write a folder that carries the method, and serve that", "\n".join(self.by_folder)),
            ("config.json", json.dumps(keys, indent=2) if keys else ""),
            ("GGUF metadata", "\n".join([f"{key} = {value}" for key, value in self.gguf_keys.items()])),
            *tensors,
            ("GGUF tensors to leave out, if the file has them", ", ".join(self.gguf_removed)),
        ]
        return [(title, text) for title, text in titled if text]

    def tables(self) -> Sequence[Rows]:
        command = [("command", self._command_text)] if self.command else []
        return [[("serves", self._heading), *(("note", note) for note in self.notes), *command, *self._files]]

    def __str__(self) -> str:
        lines = [_comment(text) for text in (self._heading, *self.notes)]
        if self.command:
            lines.append(self._command_text)
        for title, text in self._files:
            lines.append(f"# {title}:\n{text}" if "\n" in text else _comment(f"{title}: {text}"))
        return "\n".join(lines)


def _comment(text: str) -> str:
    return wrapped(text, "# ", "# ")

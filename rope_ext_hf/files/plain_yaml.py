"""YAML without aliases, for run files and model cards."""

from __future__ import annotations

from typing import Any

import yaml


class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """PyYAML's safe loader, which also refuses aliases, because with them a few lines can expand without bound."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(problem="an alias stands here; write the value out", problem_mark=mark)
        return super().compose_node(parent, index)

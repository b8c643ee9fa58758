"""Checks that a running server computes what the model computes here, or what the server itself computed earlier.

from rope_ext_hf.tools.servers import check_server
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rope_ext_hf.lazy import lazy_names

if TYPE_CHECKING:
    from rope_ext_hf.tools.servers.baselines import BaselineReport as BaselineReport
    from rope_ext_hf.tools.servers.baselines import compare_server as compare_server
    from rope_ext_hf.tools.servers.baselines import record_server as record_server
    from rope_ext_hf.tools.servers.checking import check_server as check_server
    from rope_ext_hf.tools.servers.server_report import ServerReport as ServerReport

__all__, __getattr__, __dir__ = lazy_names(__name__)

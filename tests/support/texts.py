"""Short texts that every Python installation has: files of its standard library. All of 'stdlib' takes seconds to read.

They are among the modules of 'stdlib', which the bundled model was not trained on.
"""

from __future__ import annotations

import sysconfig

_FOLDER = sysconfig.get_paths()["stdlib"]
ONE_MODULE = f"{_FOLDER}/_pydecimal.py"
TWO_MODULES = f"{_FOLDER}/t[ay][rp][fi]*.py"
"""A pattern of tarfile.py and typing.py."""

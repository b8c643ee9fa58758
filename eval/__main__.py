"""`rope-ext` as a module, for launchers: `torchrun --nproc-per-node 4 -m rope_ext_hf.eval sweep MODEL ...`."""

from __future__ import annotations

from rope_ext_hf.cli.app import main

main()

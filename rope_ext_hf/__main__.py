"""The command line, for `rope-ext` and `python -m rope_ext_hf`: it handles signals before it imports anything else."""

import gc
import sys

from rope_ext_hf.stopping import end_on_signals

_NEW_OBJECTS = 20_000  # after which Python looks for unused cycles; imports make some hundred thousand that stay


def main() -> None:
    """Run `rope-ext` with the arguments of this process."""
    end_on_signals()
    gc.set_threshold(_NEW_OBJECTS)
    from rope_ext_hf.cli.app import main

    try:
        main()
    finally:
        # Python's search for unused cycles at the exit takes a quarter of the time of a short command. If it is left
        # out, triton 3.9, which torch 2.15 imports where it is installed, prints thirty lines on what was not freed.
        if "triton" not in sys.modules:
            gc.freeze()


if __name__ == "__main__":
    main()

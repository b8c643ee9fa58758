"""The command line, for `rope-ext` and `python -m rope_ext_hf`: it handles signals before it imports anything else."""

import gc

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
        gc.freeze()  # or the exit looks for cycles among all objects, some of which take their memory back


if __name__ == "__main__":
    main()

"""The command line, for `rope-ext` and `python -m rope_ext_hf`: it handles signals before it imports anything else."""

from rope_ext_hf.stopping import end_on_signals


def main() -> None:
    """Run `rope-ext` with the arguments of this process."""
    end_on_signals()
    from rope_ext_hf.cli.app import main

    main()


if __name__ == "__main__":
    main()

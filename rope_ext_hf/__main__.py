"""`python -m rope_ext_hf` is the command line, `rope-ext`."""

from rope_ext_hf.cli.app import main

if __name__ == "__main__":
    main()

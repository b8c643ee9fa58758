"""The command line, `rope-ext`."""

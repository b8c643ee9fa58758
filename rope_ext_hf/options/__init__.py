"""The arguments of commands and functions as dataclasses: measurements, and the choice of methods."""

"""The folder of a run: its settings, journal, identity, run file and report."""

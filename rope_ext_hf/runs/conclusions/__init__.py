"""Conclusions from results: statistics, differences, verdicts, sentences and charts."""

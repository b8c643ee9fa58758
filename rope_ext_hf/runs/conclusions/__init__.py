"""What follows from results: statistics, differences, verdicts, sentences and charts."""

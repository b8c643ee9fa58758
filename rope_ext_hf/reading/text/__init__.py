"""Documents from files, data sets and memory, as text and as tokens."""

"""Conclusions from results: statistics, differences, verdicts, sentences and charts.

measures: results as one number per method and length.
statistics, differences: confidence intervals, and paired differences between methods.
findings, verdicts: which differences are significant.
conclusions: the sentences below a table.
labels: the names of methods.
charts: the charts.
"""

"""Retrieval: passkeys and other statements in a long text, with a question about one of them at its end.

statements: statements, questions and their wordings (retrievals.toml).
retrieval_prompts: the prompts, as token ids.
retrieval_runs: read the prompts, judge the answers, and show the results.
"""

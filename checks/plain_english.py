"""Check the mechanical part of how this project speaks; `make lint` runs it.

    python -m checks.plain_english

It reads the first words of docstrings, phrases in docstrings, comments, messages and pages, and names of variables.
Ruff's rule D401 holds docstrings of functions to the imperative. Only a reader can say whether a sentence is understood
at first reading.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = ("rope_ext_hf", "checks", "benchmarks", "docs", "examples", "conformance")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "examples/*.md", "conformance/*.md")
FIRST_WORDS = {"What", "How", "Where", "Which", "Whether", "Those", "Such", "So", "Whose", "Who", "When"}
PHRASES = {
    r"\btold apart\b": "no significant difference",
    r"\bnot told from\b": "no significant difference",
    r"\bcannot be told\b": "is not known, or: no significant difference",
    r"(?<![Tt]here )\bis no (?!longer|more|less|fewer|later|earlier)[a-z]+": "is not a",
    r"\bof before\b": "previous, earlier",
    r"\bof which no\b": "a sentence of its own",
    r"\bof which nothing\b": "a sentence of its own",
    r"\b[Ss]o many more\b": "the number, by name",
}
"""Phrases that readers stumbled over, and what to say in their place."""
NAMES = {"found", "asked", "told", "given"}


def docstring_offences(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition(" ")[0].rstrip(",:")
            if first in FIRST_WORDS:
                yield getattr(node, "lineno", 1), f"a docstring begins with {first!r}: begin with a verb or a noun"


def name_offences(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            line, name = node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            line, name = node.lineno, node.id
        else:
            continue
        if name in NAMES:
            yield line, f"a variable is called {name!r}: use a noun that says what it holds"


def phrase_offences(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for number, text in lines:
        for phrase, plain in PHRASES.items():
            match = re.search(phrase, text)
            if match is not None:
                yield number, f"{match.group()!r}: say {plain}"


def prose_of_code(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each string and comment."""
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.COMMENT)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            for number, line in enumerate(token.string.splitlines()):
                yield token.start[0] + number, line


def offences() -> Iterator[str]:
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == Path(__file__):
                continue
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
            checks = [docstring_offences(tree), phrase_offences(prose_of_code(source))]
            if folder == "rope_ext_hf":
                checks.append(name_offences(tree))
            for check in checks:
                for line, text in check:
                    yield f"{path.relative_to(ROOT)}:{line}: {text}"
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            for line, text in phrase_offences(iter(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))):
                yield f"{path.relative_to(ROOT)}:{line}: {text}"


def main() -> None:
    lines = list(offences())
    print("\n".join(lines))
    sys.exit(f"{len(lines)} places to say plainly" if lines else 0)


if __name__ == "__main__":
    main()

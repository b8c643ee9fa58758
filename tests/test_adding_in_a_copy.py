"""Two methods, a family, a protocol, an engine and an option, added to a copy of the tree as CONTRIBUTING.md says.

One source file each, `make figures`, and nothing else: the tests that run over everything registered then pass in the
copy. A test that fails here names a second place that somebody who adds one of these would have to find.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough  # and a target of its own: `make test-additions`
ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "site", "__pycache__", ".*_cache", "*.egg-info")

METHOD = '''

@register_method("slow-half")
@dataclass(frozen=True, kw_only=True)
class SlowHalf(RopeMethod):
    """Interpolation of the slower half of the pairs: theta_i / factor there, theta_i in the faster half."""

    factor: float

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        inv_freq = rotary.inv_freq(length.device)
        slow = torch.arange(rotary.dim // 2, device=length.device) >= rotary.dim // 4
        return torch.where(slow, inv_freq / self.factor, inv_freq), 1.0
'''

REMAPPING_METHOD = '''"""Distances beyond a window, a third as long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from rope_ext_hf.methods.base import UNBOUNDED
from rope_ext_hf.methods.registry import register_method
from rope_ext_hf.methods.remapping import RemappedPosition, RemappingMethod
from rope_ext_hf.methods.tiles import Tile, band_tiles


@register_method("far-thirds")
@dataclass(frozen=True, kw_only=True)
class FarThirds(RemappingMethod):
    """Beyond the window, distances grow a third as fast."""

    window: int = 16

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        self.check_reach(limit, "window", self.window)
        if target_length is not None:
            self.check_reach(limit, "the longest distance", self.window + (target_length - self.window) / 3)
        return replace(self)

    @property
    def exact_length(self) -> int:
        return self.window + 1

    def zone_distances(self, length: int) -> tuple[tuple[int, int], ...]:
        return (0, self.window), (self.window, UNBOUNDED)

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        return (m - n >= self.window).long()

    def key_position(self, n: Tensor) -> RemappedPosition:
        return RemappedPosition(n, divisor=3.0)

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        return RemappedPosition(m, divisor=3.0, offset=self.window * 2 / 3)

    def tiles(self, first: int, last: int) -> Iterator[Tile]:
        yield from band_tiles(0, 0, self.window, first, last)
        if last > self.window:
            yield Tile(1, (first, last), (0, last - self.window), self.window)
'''

FAMILY = """
[hrm_text]
like = "llama"
unrotated = ["v_proj", "o_proj", "gate_proj"]
"""

PROTOCOL = '''

@register_protocol("tail", uses_targets=True)
def tail(tokens: int, lengths: Sequence[int], options: ProtocolOptions) -> Iterator[Span]:
    """The last targets of each document, at every length that the document has."""
    for length in lengths:
        if tokens >= length:
            yield Span(length, tokens - length, tokens, tokens - options.targets, tokens, length)
'''


def engine(source: str) -> str:
    """mlx-lm's file under another name."""
    return source.replace('@register_engine("mlx")', '@register_engine("mlx-two")').replace("MLX", "MLXTwo")


def option(source: str) -> str:
    """`audit --quietly`, which prints nothing."""
    head, audit = source.split("\ndef audit(")
    audit = audit.replace(
        "    as_json: Json = False,\n",
        "    as_json: Json = False,\n"
        '    quietly: Annotated[bool, typer.Option("--quietly", help="Print nothing.")] = False,\n',
        1,
    ).replace("    print_text(", "    if not quietly:\n        print_text(", 1)
    return f"{head}\ndef audit({audit}"


def run(copy: Path, *arguments: str, status: int = 0) -> str:
    """A command in the copy, with the copy's package."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def contents(copy: Path) -> dict[str, bytes]:
    return {
        path.relative_to(copy).as_posix(): path.read_bytes()
        for path in copy.rglob("*")
        if path.is_file()
        and not path.is_symlink()
        and "__pycache__" not in path.parts
        and ".pytest_cache" not in path.parts
    }


def test_additions_touch_one_source_file_each(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
    before = contents(copy)

    def changed() -> set[str]:
        after = contents(copy)
        return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}

    additions = {
        "rope_ext_hf/methods/static.py": lambda source: source + METHOD,
        "rope_ext_hf/methods/far_thirds.py": lambda _: REMAPPING_METHOD,
        "patches/families.toml": lambda source: source + FAMILY,
        "rope_ext_hf/reading/protocols.py": lambda source: source + PROTOCOL,
        "rope_ext_hf/engines/mlx_two.py": lambda _: engine((ROOT / "rope_ext_hf/engines/mlx.py").read_text("utf-8")),
        "rope_ext_hf/cli/serving.py": option,
    }
    for name, add in additions.items():
        path = copy / name
        path.write_text(add(path.read_text("utf-8") if path.exists() else ""), encoding="utf-8")
    assert changed() == additions.keys()

    run(copy, "-m", "docs.make_figures")
    pages = changed() - additions.keys()
    assert all(page == "README.md" or re.fullmatch(r"docs/[a-z0-9-]+\.md", page) for page in pages), pages
    for method in ("slow-half", "far-thirds"):
        assert f"\n## {method}\n" in (copy / "docs/methods.md").read_text("utf-8")
    assert "`mlx-two`" in (copy / "README.md").read_text("utf-8")
    assert "\n## mlx-two\n" in (copy / "docs/engines.md").read_text("utf-8")

    from_copy = run(copy, "-c", "import rope_ext_hf; print(rope_ext_hf.__file__)")
    assert from_copy.strip().startswith(str(copy))
    assert "mlx-two" in run(copy, "-m", "rope_ext_hf", "serve-config", "--help")
    assert run(copy, "-m", "rope_ext_hf", "audit", "reference", "--quietly", status=1) == ""  # engines disagree on it
    contracts = ["tests/reading/test_protocols.py", "tests/serving", "tests/patches/test_families.py"]
    contracts += ["tests/test_architecture.py", "tests/test_docs.py"]
    pytest_run = ["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-m", "not slow"]
    ran = run(copy, *pytest_run, *contracts) + run(copy, *pytest_run, "-k", "slow-half or far-thirds", "tests/methods")
    for addition in ('"slow-half"', "[0-150-far-thirds]", "[hrm_text]", "[tail]"):
        assert addition in ran, f"no test of everything registered ran over {addition}"

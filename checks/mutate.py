"""Mutation of the pure modules with cosmic-ray: does a test notice when one operator or number is another?

    python checks/mutate.py                                      # a sample over all modules
    python checks/mutate.py --sample 20 rope_ext_hf/methods/static.py
    python checks/mutate.py --all rope_ext_hf/reading/protocols.py

The mutations are made in a copy of this checkout. Each runs the tests of its module in TESTS, the fast ones first,
until the first failure; without a mutation they must pass. Survivors are printed as patches; the exit status is 1 where
fewer than 90% were noticed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401 - so that forks have it

ROOT = Path(__file__).parent.parent
REMAPPED = "patches/forward/remapping_forward"
TESTS = {
    "rope_ext_hf/methods/base.py": ["methods/base", "methods/static", "methods/registry", "methods/base_composition"],
    "rope_ext_hf/methods/registry.py": ["methods/registry", "methods/base"],
    "rope_ext_hf/methods/static.py": [
        "methods/static",
        "methods/registry",
        "methods/base",
        "methods/base_composition",
        "methods/static_learnable",
    ],
    "rope_ext_hf/methods/dynamic.py": [
        "methods/dynamic",
        "methods/registry",
        "methods/base",
        "methods/base_composition",
    ],
    "rope_ext_hf/methods/dual_chunk.py": [
        "methods/remapping",
        "attention/blockwise",
        "patches/forward/remapping_forward",
    ],
    "rope_ext_hf/methods/remapping.py": ["methods/base", "attention/blockwise", REMAPPED],
    "rope_ext_hf/methods/tiles.py": ["attention/blockwise"],
    "rope_ext_hf/attention/rules.py": ["attention/blockwise", REMAPPED],
    "rope_ext_hf/attention/blockwise.py": [
        "attention/blockwise",
        "patches/forward/remapping_forward",
        "tools/modules/hybrids",
    ],
    "rope_ext_hf/rotary/phase.py": ["rotary/embedding"],
    "rope_ext_hf/rotary/pairing.py": ["rotary/pairing"],
    "rope_ext_hf/checkpoints/rows/head_blocks.py": ["checkpoints/row_layouts", "patches/families"],
    "rope_ext_hf/checkpoints/rows/row_layouts.py": ["checkpoints/row_layouts", "patches/families"],
    "rope_ext_hf/checkpoints/files/tensor_names.py": ["checkpoints/row_layouts", "patches/families"],
    "models/families.py": ["patches/families", "checkpoints/row_layouts"],
    "rope_ext_hf/reading/protocols.py": ["reading/protocols", "eval/measuring"],
}
"""Module -> its tests, those that notice most first."""

WITHOUT_A_TEST = re.compile(
    r"core/(RemoveDecorator"  # all are registrations, dataclasses and properties
    r"|ReplaceBinaryOperator_BitOr_.*"  # in annotations, which are not evaluated
    r"|ReplaceBinaryOperator_\w+_(BitOr|BitAnd|BitXor|RShift|LShift)"  # TypeError for floats: noticed by anything
    r"|ReplaceComparisonOperator_(Is|IsNot)_(Lt|LtE|Gt|GtE|Eq|NotEq)"
    r"|ReplaceComparisonOperator_\w+_(Is|IsNot))"
)
TIERS = ("not slow", "slow")  # a mutation that the first notices does not meet the second
NO_DIFFERENCE = (
    (r"ReplaceUnaryOperator_.*", r"shape\[-\d"),  # of tensors with four dimensions, counted from the other end
    (r"ReplaceComparisonOperator_(Eq|NotEq)_(Lt|LtE|Gt|GtE)", r"[=!]= \""),  # an order among names
    (r".*", r"(MAX_QUERY_BLOCK|MAX_BLOCKS|MIN_FUSED_QUERIES|SCORE_BYTES) = "),  # how much at a time: speed alone
)
"""Operators and lines whose mutations change no result: no test could tell."""
NOTICED = 0.9
LIMIT = 600  # seconds for the tests of a module; a mutation that makes them slower counts as noticed


def mutations(paths: list[str]) -> list[Any]:
    """Every mutation of these files, in the working directory."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB, use_db

    with use_db("mutations.sqlite", WorkDB.Mode.create) as database:
        init([Path(path) for path in paths], database, {})
        items = [mutation for item in database.work_items for mutation in item.mutations]
    return [item for item in items if not WITHOUT_A_TEST.fullmatch(item.operator_name) and makes_a_difference(item)]


def makes_a_difference(mutation: Any) -> bool:
    line = Path(mutation.module_path).read_text(encoding="utf-8").splitlines()[mutation.start_pos[0] - 1]
    operator = mutation.operator_name.removeprefix("core/")
    return not any(re.fullmatch(name, operator) and re.search(text, line) for name, text in NO_DIFFERENCE)


def module_passes(module: str, tier: str) -> bool:
    """Run a module's tests of a tier in a fork of this process, which has imported libraries but not the package."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        signal.alarm(LIMIT)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        files = [str(Path("tests", name).with_name(f"test_{Path(name).name}.py")) for name in TESTS[module]]
        options = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that transformers has imported
        os._exit(pytest.main(["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", tier, *options, *files]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(TESTS), help=f"of {', '.join(TESTS)}")
    parser.add_argument("--sample", type=int, default=100, help="mutations drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="all mutations instead of a sample")
    parser.add_argument("--minutes", type=float, help="stop after this time and report what was run")
    options = parser.parse_args()
    if unknown := set(options.modules) - TESTS.keys():
        parser.error(f"no tests are known for {', '.join(sorted(unknown))}; add them to TESTS in {__file__}")

    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator

    started, noticed, survivors = time.monotonic(), 0, []
    with tempfile.TemporaryDirectory() as copy:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            target = Path(copy, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": copy, "OMP_NUM_THREADS": "1"}
        sys.path[:0] = [copy]
        sys.dont_write_bytecode = True
        drawn = mutations(options.modules)
        if not options.all:
            drawn = random.Random(options.seed).sample(drawn, min(options.sample, len(drawn)))
        for module in sorted({str(mutation.module_path) for mutation in drawn}):
            if not all(module_passes(module, tier) for tier in TIERS):
                sys.exit(f"the tests of {module} fail, or take more than {LIMIT} s, without any mutation")
        for at, mutation in enumerate(drawn, start=1):
            if options.minutes and time.monotonic() - started > 60 * options.minutes:
                break
            operator = get_operator(mutation.operator_name)()
            with use_mutation(mutation.module_path, operator, mutation.occurrence) as (before, after):
                survived = all(module_passes(str(mutation.module_path), tier) for tier in TIERS)
            noticed += not survived
            line = mutation.start_pos[0]
            print(
                f"{at}/{len(drawn)} {'SURVIVED' if survived else 'noticed'} {mutation.module_path}:{line} "
                f"{mutation.operator_name} ({time.monotonic() - started:.0f} s)",
                flush=True,
            )
            if survived:
                survivors.append("\n".join(unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)))
        os.chdir(ROOT)
    print(*survivors, sep="\n")
    ran = noticed + len(survivors)
    print(f"{noticed} of {ran} mutations were noticed")
    return int(noticed < NOTICED * ran)


if __name__ == "__main__":
    sys.exit(main())

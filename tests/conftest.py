"""What all test modules share: settings of hypothesis, the slow tier, fixtures.

Slow tests are those marked `slow` and, of tests over model families, those of families outside QUICK_FAMILIES.
`make test` leaves them out, `make test-slow` runs them. tests/support/tiers.py says which of them it leaves out, too.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

from tests.support.tiers import KINDS_OF_FAMILIES, QUICK_FAMILIES, in_turn

if TYPE_CHECKING:
    from tests.support.saved_models import Lookup

hypothesis.settings.register_profile("tests", deadline=None, database=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without collections of garbage, which search all that is imported again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    models = sys.modules.get("tests.support.models")  # it imports transformers, which some tests do without
    families = set() if models is None else {*models.FAMILIES, *models.ROTATING}
    cases = Counter[str]()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % sampled.args[0]:
                item.add_marker(pytest.mark.thorough)
            cases[test] += 1
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        family = params.get("name", params.get("model_type"))
        if isinstance(family, str) and family in families:
            if family not in QUICK_FAMILIES:
                item.add_marker(pytest.mark.slow)
            if family not in KINDS_OF_FAMILIES and not in_turn(item.name):
                item.add_marker(pytest.mark.thorough)
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def frozen_libraries() -> Iterator[None]:
    """Collections of garbage leave out what was there before a module: libraries of a million objects, all tests."""
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A compiler that has compiled nothing, before the test and after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Lookup:
    """Patched models saved in folders, each saved when it is first asked for."""
    from tests.support.saved_models import save_case

    return functools.cache(functools.partial(save_case, tmp_path_factory.mktemp("saved")))

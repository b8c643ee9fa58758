"""A suite with one task: retrieve a value from a long JSON object, as in `json_kv` of HELMET.

HELMET is Yen et al. 2024 (arXiv 2410.02694, MIT). Keys and values are random UUIDs, as in "Lost in the Middle" (Liu et
al. 2023, arXiv 2307.03172). Two keys with their values stand before the question as examples. The object has as many
keys as the length allows, and the key in question stands at a random place. The wording is HELMET's with two changes:
the object has a heading, and the instruction, which stands below the object, says "above".
"""

from __future__ import annotations

import json
import random
import uuid
from functools import partial

from rope_ext_hf.tools.suites.base import PromptSettings, Sample, Suite, fill, register_suite

_EXAMPLES = 2
_BUDGET = 100  # tokens of an answer, as in HELMET


@register_suite
class JsonKv(Suite):
    """The suite json-kv, whose only task, `kv`, asks for the value of one key in a long JSON object."""

    name = "json-kv"
    tasks = ("kv",)

    def make(self, task: str, settings: PromptSettings) -> list[Sample]:
        return fill(task, settings, partial(_sample, settings), smallest=_EXAMPLES + 1, step=_EXAMPLES + 1)


def _sample(settings: PromptSettings, index: int, keys: int) -> Sample:
    """Make prompt number `index`, whose JSON object has `keys` keys."""
    rng = random.Random(f"{settings.seed} {index}")
    place = rng.random()
    uuids = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2 * keys)]
    pairs = list(zip(uuids[::2], uuids[1::2], strict=True))
    examples, (key, value), others = pairs[:_EXAMPLES], pairs[_EXAMPLES], pairs[_EXAMPLES + 1 :]
    members = [*examples, *others]
    rng.shuffle(members)
    members.insert(int(place * keys), (key, value))
    solved = "".join(f"Key: {name}\nCorresponding value: {text}\n\n" for name, text in examples)
    prompt = (
        f"JSON data:\n{json.dumps(dict(members))}\n\n"
        f"Extract the value corresponding to the specified key in the JSON object above.\n\n{solved}Key: {key}\n"
    )
    prefix = "Corresponding value:"
    wrong = tuple(text for _, text in [*others, *examples])
    return Sample(prompt, prefix, (value,), _BUDGET, settings.tokens(prompt + prefix) + _BUDGET, wrong)

"""One key of a long JSON object: after `json_kv` of HELMET (Yen et al. 2024, arXiv 2410.02694, MIT), made anew.

Keys and values are random UUIDs, as in "Lost in the Middle" (Liu et al. 2023, arXiv 2307.03172). Two keys with their
values stand before the question as examples. The object has as many keys as the length takes; the one asked for stands
at a random place. The wording is HELMET's, but that the object has a heading and is named "above", where it stands.
"""

from __future__ import annotations

import json
import random
import uuid
from functools import partial

from rope_ext_hf.tools.suites.base import PromptSettings, Sample, Suite, fill, register_suite

_EXAMPLES = 2
_BUDGET = 100


@register_suite
class JsonKv(Suite):
    """One task, `kv`: the value of a key."""

    name = "json-kv"
    tasks = ("kv",)

    def make(self, task: str, wanted: PromptSettings) -> list[Sample]:
        return fill(task, wanted, partial(_sample, wanted), _EXAMPLES + 1, _EXAMPLES + 1)


def _sample(wanted: PromptSettings, index: int, keys: int) -> Sample:
    rng = random.Random(f"{wanted.seed} {index}")
    place = rng.random()
    made = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2 * keys)]
    pairs = list(zip(made[::2], made[1::2], strict=True))
    examples, (key, value), others = pairs[:_EXAMPLES], pairs[_EXAMPLES], pairs[_EXAMPLES + 1 :]
    listed = [*examples, *others]
    rng.shuffle(listed)
    listed.insert(int(place * keys), (key, value))
    shown = "".join([f"Key: {name}\nCorresponding value: {it}\n\n" for name, it in examples])
    prompt = (
        f"JSON data:\n{json.dumps(dict(listed))}\n\n"
        f"Extract the value corresponding to the specified key in the JSON object above.\n\n{shown}Key: {key}\n"
    )
    prefix = "Corresponding value:"
    wrong = tuple([it for _, it in [*others, *examples]])
    return Sample(prompt, prefix, (value,), _BUDGET, wanted.tokens(prompt + prefix) + _BUDGET, wrong)

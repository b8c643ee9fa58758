"""One key of a long JSON object: after `json_kv` of HELMET (Yen et al. 2024, arXiv 2410.02694, MIT), made anew.

Keys and values are random UUIDs, as in "Lost in the Middle" (Liu et al. 2023, arXiv 2307.03172). Two keys with their
values stand before the question as examples. The object has as many keys as the length takes; the one asked for stands
at a random place. No package beside this one is needed.
"""

from __future__ import annotations

import json
import random
import uuid
from typing import TYPE_CHECKING

from rope_ext_hf.eval.suites import Sample, Suite, count_tokens, largest_fitting, register_suite, too_short

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__: list[str] = []

EXAMPLES = 2
BUDGET = 100


@register_suite
class JsonKv(Suite):
    """One task, `kv`: the value of a key."""

    name = "json-kv"
    tasks = ("kv",)

    def samples(
        self,
        task: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        length: int,
        count: int,
        seed: int,
        haystack: str,
        reserved: int = 0,
    ) -> list[Sample]:
        room = length - reserved
        made = []
        for index in range(count):
            smallest = EXAMPLES + 1

            def sample(keys: int, index: int = index) -> Sample:
                return _sample(tokenizer, random.Random(f"{seed} {index}"), keys)

            each = max(1, sample(2 * smallest).length - sample(smallest).length) / smallest
            keys = largest_fitting(smallest, max(smallest, int(2 * room / each)), lambda n: sample(n).length <= room)
            if keys is None:
                raise too_short(task, length)
            made.append(sample(keys))
        return made


def _sample(tokenizer: PreTrainedTokenizerBase, rng: random.Random, keys: int) -> Sample:
    place = rng.random()
    pairs = [(_uuid(rng), _uuid(rng)) for _ in range(keys)]
    examples, (key, value), others = pairs[:EXAMPLES], pairs[EXAMPLES], pairs[EXAMPLES + 1 :]
    listed = [*examples, *others]
    rng.shuffle(listed)
    listed.insert(int(place * keys), (key, value))
    shown = "".join(f"Key: {name}\nCorresponding value: {it}\n\n" for name, it in examples)
    prompt = (
        f"JSON data:\n{json.dumps(dict(listed))}\n\n"
        f"Extract the value corresponding to the specified key in the JSON object above.\n\n{shown}Key: {key}\n"
    )
    prefix = "Corresponding value:"
    wrong = tuple(it for _, it in [*others, *examples])
    return Sample(prompt, prefix, (value,), BUDGET, count_tokens(tokenizer, prompt + prefix) + BUDGET, wrong)


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))

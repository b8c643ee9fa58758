"""BABILong: bAbI's facts among the sentences of any text (Kuratov et al. 2024, arXiv 2406.10149).

qa1 to qa5 of bAbI (Weston et al. 2015, arXiv 1502.05698). The facts are made by a small world of people, things and
rooms, and not taken from bAbI's files; the wordings around them, and how an answer is scored, are those of BABILong.
The haystack gives the sentences between them. The answer is begun with "Answer:", which BABILong leaves to the model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from rope_ext_hf.errors import MethodError
from rope_ext_hf.tools.suites.base import PromptSettings, Sample, Suite, fill, register_suite, wordings

_WORDINGS = {task: {key: text.strip() for key, text in texts.items()} for task, texts in wordings("babilong").items()}
_PROMPT = "{instruction}\n\n{examples}\n\n{post_prompt}\n\n<context>\n{context}\n</context>\n\nQuestion: {question}"
_BUDGET = 20  # tokens of an answer, as in BABILong's evaluation
_PEOPLE = ("Daniel", "John", "Mary", "Sandra")
_GIVERS = ("Bill", "Fred", "Jeff", "Mary")
_ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
_THINGS = ("apple", "football", "milk")
_GOES = ("moved to", "went to", "journeyed to", "travelled to", "went back to")
_TAKES = ("got the {} there", "grabbed the {} there", "picked up the {} there", "took the {} there")
_DROPS = ("dropped the {}", "discarded the {}", "left the {}", "put down the {}")
_GIVES = ("gave the {} to {}", "handed the {} to {}", "passed the {} to {}")
_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


class Story(NamedTuple):
    """Facts in order, a question, its answer, and the words that answers of the task are among."""

    facts: list[str]
    question: str
    answer: str
    labels: tuple[str, ...]


@register_suite
class BabiLong(Suite):
    """qa1 to qa5; an answer is right where it names the right word of the task, and no other."""

    name = "babilong"
    tasks = ("qa1", "qa2", "qa3", "qa4", "qa5")

    def make(self, task: str, wanted: PromptSettings) -> list[Sample]:
        sentences = _sentences(wanted.haystack)
        if not sentences:
            raise MethodError("the haystack of babilong has no sentence of ten characters; give another text")
        return fill(task, wanted, partial(_sample, task, wanted, sentences), 0, 40)

    @staticmethod
    def score(answer: str, references: Sequence[str], others: Sequence[str] = ()) -> float:
        """Whether the first sentence has the right word and none of the others (BABILong's `compare_answers`)."""
        first = re.split(r"\.|<context>|<example>", answer.lower())[0]
        return float(references[0].lower() in first and not any(other.lower() in first for other in others))


@lru_cache(maxsize=1)
def _sentences(text: str) -> list[str]:
    parts = (part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", text))
    return [part for part in parts if len(part) >= 10]


def _sample(task: str, wanted: PromptSettings, sentences: Sequence[str], index: int, noise: int) -> Sample:
    rng = random.Random(f"{task} {wanted.seed} {index}")
    story = STORIES[task](rng)
    start = rng.randrange(len(sentences))
    lines = [sentences[(start + i) % len(sentences)] for i in range(noise)]
    places = sorted(rng.random() for _ in story.facts)
    for fact, place in reversed(list(zip(story.facts, places, strict=True))):
        lines.insert(int(place * (noise + 1)), fact)
    prompt = _PROMPT.format(context=" ".join(lines), question=story.question, **_WORDINGS[task])
    # A word of the question is never the answer.
    others = tuple(x for x in story.labels if x != story.answer and x.lower() not in story.question.lower())
    length = wanted.tokens(prompt + "\nAnswer:") + _BUDGET
    return Sample(prompt, "\nAnswer:", (story.answer,), _BUDGET, length, others)


def _goes(rng: random.Random, who: str, room: str) -> str:
    return f"{who} {rng.choice(_GOES)} the {room}."


def _where_is_somebody(rng: random.Random) -> Story:
    facts, rooms = [], dict[str, str]()
    for _ in range(rng.randint(2, 10)):
        who = rng.choice(_PEOPLE)
        rooms[who] = rng.choice([room for room in _ROOMS if room != rooms.get(who)])
        facts.append(_goes(rng, who, rooms[who]))
    who = rng.choice(list(rooms))
    return Story(facts, f"Where is {who}?", rooms[who], _ROOMS)


def _carried(rng: random.Random, fewest: int, most: int, least_rooms: int) -> tuple[list[str], str, list[str]]:
    """People who walk, take and drop things: the facts, a thing, and the rooms that it was in, the last one last."""
    facts, rooms, holder, seen = [], dict[str, str](), dict[str, str](), dict[str, list[str]]()
    for _ in range(rng.randint(fewest, most)):
        who = rng.choice(_PEOPLE)
        held = [thing for thing, by in holder.items() if by == who]
        lying = [x for x in _THINGS if x not in holder and (x not in seen or seen[x][-1] == rooms.get(who))]
        act = rng.random()
        if who in rooms and lying and act < 0.35:
            thing = rng.choice(lying)
            holder[thing] = who
            facts.append(f"{who} {rng.choice(_TAKES).format(thing)}.")
            if thing not in seen:
                seen[thing] = [rooms[who]]
        elif held and act < 0.5:
            thing = rng.choice(held)
            del holder[thing]
            facts.append(f"{who} {rng.choice(_DROPS).format(thing)}.")
        else:
            rooms[who] = rng.choice([room for room in _ROOMS if room != rooms.get(who)])
            facts.append(_goes(rng, who, rooms[who]))
            for thing in held:
                seen[thing].append(rooms[who])
    if not (known := [thing for thing, places in seen.items() if len(places) >= least_rooms]):
        return _carried(rng, fewest, most, least_rooms)
    thing = rng.choice(known)
    return facts, thing, seen[thing]


def _where_is_a_thing(rng: random.Random) -> Story:
    facts, thing, rooms = _carried(rng, 4, 16, least_rooms=1)
    return Story(facts, f"Where is the {thing}?", rooms[-1], _ROOMS)


def _where_was_a_thing(rng: random.Random) -> Story:
    facts, thing, rooms = _carried(rng, 8, 32, least_rooms=2)
    return Story(facts, f"Where was the {thing} before the {rooms[-1]}?", rooms[-2], _ROOMS)


def _what_lies_there(rng: random.Random) -> Story:
    first, middle, last = rng.sample(_ROOMS, 3)
    one = rng.choice(list(_OPPOSITE))
    other = rng.choice([way for way in _OPPOSITE if way != _OPPOSITE[one]])  # else two rooms lie on one side
    facts = [f"The {first} is {one} of the {middle}.", f"The {middle} is {other} of the {last}."]
    rng.shuffle(facts)
    asked = [(f"What is {one} of the {middle}?", first), (f"What is the {middle} {other} of?", last)]
    question, answer = rng.choice(asked)
    return Story(facts, question, answer, _ROOMS)


def _who_gave_what(rng: random.Random) -> Story:
    facts, holder, given = list[str](), dict[str, str](), list[tuple[str, str, str]]()
    while not given or len(facts) < 4 or (len(facts) < 20 and rng.random() < 0.8):
        who, act = rng.choice(_GIVERS), rng.random()
        held = [thing for thing, by in holder.items() if by == who]
        free = [thing for thing in _THINGS if thing not in holder]
        if held and act < 0.5:
            thing, whom = rng.choice(held), rng.choice([other for other in _GIVERS if other != who])
            holder[thing] = whom
            given.append((who, thing, whom))
            facts.append(f"{who} {rng.choice(_GIVES).format(thing, whom)}.")
        elif free and act < 0.75:
            holder[free[0]] = who
            facts.append(f"{who} {rng.choice(_TAKES).format(free[0])}.")
        else:
            facts.append(_goes(rng, who, rng.choice(_ROOMS)))
    who, thing, whom = given[-1]
    question, answer = rng.choice(
        [
            (f"What did {who} give to {whom}?", thing),
            (f"Who gave the {thing} to {whom}?", who),
            (f"Who gave the {thing}?", who),
            (f"Who received the {thing}?", whom),
            (f"Who did {who} give the {thing} to?", whom),
        ]
    )
    return Story(facts, question, answer, (*_GIVERS, *_THINGS))


STORIES: dict[str, Callable[[random.Random], Story]] = {
    "qa1": _where_is_somebody,
    "qa2": _where_is_a_thing,
    "qa3": _where_was_a_thing,
    "qa4": _what_lies_there,
    "qa5": _who_gave_what,
}

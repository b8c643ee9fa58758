"""BABILong: facts of bAbI's tasks qa1 to qa5, hidden among the sentences of any text.

After Kuratov et al. 2024 (arXiv 2406.10149); the tasks are those of bAbI (Weston et al. 2015, arXiv 1502.05698). The
facts come from a small simulated world of people, things and rooms, not from bAbI's files. The wording around the facts
and the scoring of answers are BABILong's. The sentences between the facts come from the haystack. The prompt begins the
answer with "Answer:", which BABILong leaves to the model.
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
_LEAST_SENTENCE = 10  # characters; shorter pieces of the haystack are left out
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
    """A list of facts, a question about them, and the answer to it."""

    facts: list[str]  # sentences, in the order of events
    question: str
    answer: str
    labels: tuple[str, ...]  # all words that are answers in this task


@register_suite
class BabiLong(Suite):
    """The suite BABILong: tasks qa1 to qa5 about facts in a long text.

    An answer is right if it contains the right word and none of the words that would be other answers to the task.
    """

    name = "babilong"
    tasks = ("qa1", "qa2", "qa3", "qa4", "qa5")

    def make(self, task: str, settings: PromptSettings) -> list[Sample]:
        sentences = _sentences(settings.haystack)
        if not sentences:
            raise MethodError(
                f"the haystack of babilong has no sentence of at least {_LEAST_SENTENCE} characters; give another text "
                "with --haystack"
            )
        return fill(task, settings, partial(_sample, task, settings, sentences), smallest=0, step=40)

    @staticmethod
    def score(answer: str, references: Sequence[str], others: Sequence[str] = ()) -> float:
        """Return 1 if the answer's first sentence has the right word and none of the wrong ones, else 0.

        This is `compare_answers` of BABILong.
        """
        first_sentence = re.split(r"\.|<context>|<example>", answer.lower())[0]
        has_right = references[0].lower() in first_sentence
        has_wrong = any(other.lower() in first_sentence for other in others)
        return float(has_right and not has_wrong)


@lru_cache(maxsize=1)
def _sentences(text: str) -> list[str]:
    """Return the sentences of a text, without those that are too short to hide facts among."""
    parts = (part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", text))
    return [part for part in parts if len(part) >= _LEAST_SENTENCE]


def _sample(task: str, settings: PromptSettings, sentences: Sequence[str], index: int, noise: int) -> Sample:
    """Make prompt number `index` of a task, with `noise` sentences of the haystack around the facts."""
    rng = random.Random(f"{task} {settings.seed} {index}")
    story = STORIES[task](rng)
    start = rng.randrange(len(sentences))
    lines = [sentences[(start + i) % len(sentences)] for i in range(noise)]
    places = sorted(rng.random() for _ in story.facts)
    for fact, place in reversed(list(zip(story.facts, places, strict=True))):
        lines.insert(int(place * (noise + 1)), fact)
    prompt = _PROMPT.format(context=" ".join(lines), question=story.question, **_WORDINGS[task])
    # A word of the question is never the answer, so an answer that repeats it is not wrong for that.
    question = story.question.lower()
    others = tuple(word for word in story.labels if word != story.answer and word.lower() not in question)
    length = settings.tokens(prompt + "\nAnswer:") + _BUDGET
    return Sample(prompt, "\nAnswer:", (story.answer,), _BUDGET, length, others)


def _goes(rng: random.Random, who: str, room: str) -> str:
    """Return a sentence that says that somebody went to a room."""
    return f"{who} {rng.choice(_GOES)} the {room}."


def _where_is_somebody(rng: random.Random) -> Story:
    """Return a story for task qa1: people walk about, and the question is where one of them is."""
    facts, rooms = [], dict[str, str]()
    for _ in range(rng.randint(2, 10)):
        who = rng.choice(_PEOPLE)
        rooms[who] = rng.choice([room for room in _ROOMS if room != rooms.get(who)])
        facts.append(_goes(rng, who, rooms[who]))
    who = rng.choice(list(rooms))
    return Story(facts, f"Where is {who}?", rooms[who], _ROOMS)


class _CarriedThing(NamedTuple):
    """Facts about people who walk about, take things and drop them, with one thing and the rooms that it was in."""

    facts: list[str]
    thing: str
    rooms: list[str]  # rooms that the thing was in, in order


def _carried_thing(rng: random.Random, fewest: int, most: int, least_rooms: int) -> _CarriedThing:
    """Return `fewest` to `most` facts about people who carry things, and a thing that was in several rooms.

    The thing was in at least `least_rooms` rooms.
    """
    facts = list[str]()
    rooms = dict[str, str]()  # by person, the room that they are in
    holder = dict[str, str]()  # by thing, the person who carries it
    visited = dict[str, list[str]]()  # by thing, the rooms that it was in
    for _ in range(rng.randint(fewest, most)):
        who = rng.choice(_PEOPLE)
        held = [thing for thing, by in holder.items() if by == who]
        lying = [
            thing
            for thing in _THINGS
            if thing not in holder and (thing not in visited or visited[thing][-1] == rooms.get(who))
        ]
        act = rng.random()
        if who in rooms and lying and act < 0.35:
            thing = rng.choice(lying)
            holder[thing] = who
            facts.append(f"{who} {rng.choice(_TAKES).format(thing)}.")
            if thing not in visited:
                visited[thing] = [rooms[who]]
        elif held and act < 0.5:
            thing = rng.choice(held)
            del holder[thing]
            facts.append(f"{who} {rng.choice(_DROPS).format(thing)}.")
        else:
            rooms[who] = rng.choice([room for room in _ROOMS if room != rooms.get(who)])
            facts.append(_goes(rng, who, rooms[who]))
            for thing in held:
                visited[thing].append(rooms[who])
    candidates = [thing for thing, places in visited.items() if len(places) >= least_rooms]
    if not candidates:  # nobody took a thing far enough: tell another story
        return _carried_thing(rng, fewest, most, least_rooms)
    thing = rng.choice(candidates)
    return _CarriedThing(facts, thing, visited[thing])


def _where_is_a_thing(rng: random.Random) -> Story:
    """Return a story for task qa2: people carry things about, and the question is where a thing is."""
    facts, thing, rooms = _carried_thing(rng, 4, 16, least_rooms=1)
    return Story(facts, f"Where is the {thing}?", rooms[-1], _ROOMS)


def _where_was_a_thing(rng: random.Random) -> Story:
    """Return a story for task qa3: people carry things about, and the question is about the last room but one.

    That is the room where a thing was before it came to its last room.
    """
    facts, thing, rooms = _carried_thing(rng, 8, 32, least_rooms=2)
    return Story(facts, f"Where was the {thing} before the {rooms[-1]}?", rooms[-2], _ROOMS)


def _what_lies_there(rng: random.Random) -> Story:
    """Return a story for task qa4: three rooms lie beside each other, and the question is which lies in a direction."""
    first, middle, last = rng.sample(_ROOMS, 3)
    direction = rng.choice(list(_OPPOSITE))
    # The opposite direction would put the first and the last room on the same side of the middle one.
    second_direction = rng.choice([way for way in _OPPOSITE if way != _OPPOSITE[direction]])
    facts = [f"The {first} is {direction} of the {middle}.", f"The {middle} is {second_direction} of the {last}."]
    rng.shuffle(facts)
    question, answer = rng.choice(
        [
            (f"What is {direction} of the {middle}?", first),
            (f"What is the {middle} {second_direction} of?", last),
        ]
    )
    return Story(facts, question, answer, _ROOMS)


def _who_gave_what(rng: random.Random) -> Story:
    """Return a story for task qa5: people give things to each other, and the question is about the last gift."""
    facts, holder = list[str](), dict[str, str]()
    gifts = list[tuple[str, str, str]]()  # who gave what to whom
    while not gifts or len(facts) < 4 or (len(facts) < 20 and rng.random() < 0.8):
        who, act = rng.choice(_GIVERS), rng.random()
        held = [thing for thing, by in holder.items() if by == who]
        free = [thing for thing in _THINGS if thing not in holder]
        if held and act < 0.5:
            thing, whom = rng.choice(held), rng.choice([other for other in _GIVERS if other != who])
            holder[thing] = whom
            gifts.append((who, thing, whom))
            facts.append(f"{who} {rng.choice(_GIVES).format(thing, whom)}.")
        elif free and act < 0.75:
            holder[free[0]] = who
            facts.append(f"{who} {rng.choice(_TAKES).format(free[0])}.")
        else:
            facts.append(_goes(rng, who, rng.choice(_ROOMS)))
    who, thing, whom = gifts[-1]
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
"""The maker of a task's stories, by the task's name."""

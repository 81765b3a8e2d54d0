"""Stories in the grammar of bAbI's tasks 1 to 5 (Weston et al., "Towards AI-Complete Question Answering", 2015).

No package contains bAbI's own files. These stories use bAbI's sentences, people, places, things and rules (a thing goes
where its carrier goes; the last fact counts). They are newly drawn, not bAbI's own stories.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random

PEOPLE = ("Mary", "John", "Sandra", "Daniel")
GIVERS = ("Fred", "Jeff", "Bill", "Mary")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
DIRECTIONS = {"north": "south", "south": "north", "east": "west", "west": "east"}
MOVES = ("moved to", "went to", "went back to", "journeyed to", "travelled to")
TAKES = ("got", "took", "grabbed", "picked up")
DROPS = ("dropped", "left", "discarded", "put down")
GIVES = ("gave", "handed", "passed")


@dataclass(frozen=True)
class Story:
    """A story and its question. others: further questions, each as (told, question, answer); the first ``told`` facts
    answer it."""

    facts: list[str]
    question: str
    answer: str
    others: list[tuple[int, str, str]]


LABELS = {
    "qa1": PLACES, "qa2": PLACES, "qa3": PLACES, "qa4": PLACES,
    "qa5": tuple(sorted({*GIVERS, *THINGS})),
}  # fmt: skip
"""All possible answers of a task."""


class _World:
    """State of a story: people's places and the things they carry; each method adds one fact."""

    def __init__(self, random: Random, people: tuple[str, ...]):
        self.random, self.people = random, people
        self.facts: list[str] = []
        self.place: dict[str, str] = {}
        self.carrier: dict[str, str] = {}
        self.seen: dict[str, list[str]] = {thing: [] for thing in THINGS}
        """The places where each thing has been, in order."""

    def move(self):
        person = self.random.choice(self.people)
        place = self.random.choice([p for p in PLACES if p != self.place.get(person)])
        self.facts.append(f"{person} {self.random.choice(MOVES)} the {place}.")
        self.place[person] = place
        for thing, carrier in self.carrier.items():
            if carrier == person:
                self._put(thing, place)

    def take(self):
        """Someone whose place is known takes a thing that lies there or was not seen yet."""
        choices = [
            (person, thing)
            for person, place in self.place.items()
            for thing in THINGS
            if thing not in self.carrier and (not self.seen[thing] or self.seen[thing][-1] == place)
        ]
        if not choices:
            return self.move()
        person, thing = self.random.choice(choices)
        self.facts.append(f"{person} {self.random.choice(TAKES)} the {thing}{self._there()}.")
        self.carrier[thing] = person
        return self._put(thing, self.place[person])

    def drop(self):
        if not self.carrier:
            return self.take()
        thing = self.random.choice(sorted(self.carrier))
        person = self.carrier.pop(thing)
        self.facts.append(f"{person} {self.random.choice(DROPS)} the {thing}{self._there()}.")
        return None

    def give(self) -> tuple[str, str, str] | None:
        """(giver, thing, receiver), or None if no one has anything yet."""
        if not self.carrier:
            return self.take()
        thing = self.random.choice(sorted(self.carrier))
        giver = self.carrier[thing]
        receiver = self.random.choice([p for p in self.people if p != giver])
        self.facts.append(f"{giver} {self.random.choice(GIVES)} the {thing} to {receiver}.")
        self.carrier[thing] = receiver
        return giver, thing, receiver

    def _there(self) -> str:
        return self.random.choice(["", " there"])

    def _put(self, thing: str, place: str):
        if self.seen[thing][-1:] != [place]:
            self.seen[thing].append(place)


Questions = list[tuple[str, str]]
"""Pairs of question and answer."""


def _qa1(world: _World, random: Random) -> Iterator[Questions]:
    for _ in range(2 * random.randint(1, 5)):
        world.move()
        yield [(f"Where is {person}?", place) for person, place in sorted(world.place.items())]


def _tale(world: _World, random: Random) -> Iterator[None]:
    """Moves, takes and drops."""
    for _ in range(random.randint(4, 20)):
        random.choice([world.move, world.move, world.take, world.drop])()
        yield


def _qa2(world: _World, random: Random) -> Iterator[Questions]:
    for _ in _tale(world, random):
        yield [(f"Where is the {thing}?", places[-1]) for thing, places in world.seen.items() if places]


def _qa3(world: _World, random: Random) -> Iterator[Questions]:
    for _ in _tale(world, random):
        # A place that a thing has been to twice would leave open which time is meant.
        yield [
            (f"Where was the {thing} before the {place}?", before)
            for thing, places in world.seen.items()
            for before, place in pairwise(places)
            if places.count(place) == 1
        ]


def _qa4(world: _World, random: Random) -> Iterator[Questions]:
    middle, *others = random.sample(PLACES, 3)
    sides = list(zip(others, random.sample(sorted(DIRECTIONS), 2), strict=True))
    for other, direction in sides:
        if random.random() < 0.5:
            world.facts.append(f"The {other} is {direction} of the {middle}.")
        else:
            world.facts.append(f"The {middle} is {DIRECTIONS[direction]} of the {other}.")
    questions = []
    for other, direction in sides:
        question = f"What is {direction} of the {middle}?"
        if random.random() < 0.5:
            question = f"What is the {middle} {DIRECTIONS[direction]} of?"
        questions.append((question, other))
    yield from ([], questions)


def _qa5(world: _World, random: Random) -> Iterator[Questions]:
    for _ in range(random.randint(3, 16)):
        action = random.choice([world.move, world.take, world.drop, world.give, world.give])
        happened = action()
        if action != world.give or happened is None:
            yield []  # bAbI asks about what has just happened.
            continue
        giver, thing, receiver = happened
        yield [
            (f"What did {giver} give to {receiver}?", thing),
            (f"Who gave the {thing} to {receiver}?", giver),
            (f"Who did {giver} give the {thing} to?", receiver),
            (f"Who gave the {thing}?", giver),
            (f"Who received the {thing}?", receiver),
        ]


TASKS: dict[str, tuple[tuple[str, ...], Callable[[_World, Random], Iterator[Questions]]]] = {
    "qa1": (PEOPLE, _qa1), "qa2": (PEOPLE, _qa2), "qa3": (PEOPLE, _qa3), "qa4": (PEOPLE, _qa4), "qa5": (GIVERS, _qa5),
}  # fmt: skip
"""People of a task, and its storyteller: a function that adds facts to a world one by one and yields, after each fact,
the questions that can be asked."""


def most_facts(length: int) -> int:
    """Most facts of a story in a text of ``length`` tokens, at 8 tokens a fact."""
    return max(4, length // 8)


def asked(question: str) -> str:
    """End of a prompt, up to the answer, in the wording of fine-tuning."""
    return f"\nQuestion: {question}\nAnswer:"


def story(task: str, random: Random, most_facts: int) -> Story:
    """Draw a story with at most ``most_facts`` facts; every task has stories if that is at least 4."""
    people, tell = TASKS[task]
    while True:
        world = _World(random, people)
        asked = list(tell(world, random))
        if asked[-1] and len(world.facts) <= most_facts:
            question, answer = asked[-1].pop(random.randrange(len(asked[-1])))
            others = [(told, *each) for told, questions in enumerate(asked, 1) for each in questions]
            return Story(world.facts, question, answer, others)

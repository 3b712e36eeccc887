"""The text of the demo model: reads text/ and draws conversations and prose from it.

A topic holds questions, thoughts and answers.  Its slots ("term: a block") fill the frames of
frames.txt ("What is {t}?"), so one topic has hundreds of questions.  Everything is drawn from one
random generator: the same seed gives the same stream.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import generated

SLOT_KINDS = ("term", "do", "when", "clause")
ARTICLE = re.compile(r"^(a|an|the|your) ")


@dataclass(frozen=True)
class ToolUse:
    """A call that was made for a question, the thought before it, and what the tool answered."""

    name: str
    arguments: dict[str, str]
    thought: str
    result: str

    def messages(self) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
        if self.thought:
            message["reasoning_content"] = self.thought
        return [message, {"role": "tool", "content": self.result}]


@dataclass(frozen=True)
class Exchange:
    """One question with its answer; a `verbatim` question is not to be worded in other ways."""

    question: str
    thought: str
    answer: str
    verbatim: bool = False
    tool_use: ToolUse | None = None


@dataclass(frozen=True)
class Chat:
    """A conversation. Only the answer of the last exchange is learnt."""

    exchanges: list[Exchange]
    system: str
    thinking: bool
    tools: list[dict[str, Any]] = field(default_factory=list)

    def prompt_messages(self) -> list[dict[str, Any]]:
        """The messages before the last answer, as a client sends them."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for exchange in self.exchanges:
            messages.append({"role": "user", "content": exchange.question})
            messages += exchange.tool_use.messages() if exchange.tool_use else []
            messages.append({"role": "assistant", "content": exchange.answer})
        return messages[:-1]


@dataclass
class Topic:
    """The facts of text/*.txt about one thing; README.md explains the file format."""

    name: str
    weight: float = 1.0
    slots: dict[str, list[str]] = field(default_factory=dict)
    questions: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    more: list[str] = field(default_factory=list)
    after: dict[str, list[str]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return the topic's name in a thought."""
        return self.slots["term"][0] if "term" in self.slots else "that"


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text file without comments; empty lines are kept."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            yield line.strip()


def _read_topics(path: Path) -> list[Topic]:
    """Topics of one file. Raises ValueError with the line that is not understood."""
    topics: list[Topic] = []
    for line in filter(None, _lines(path)):
        mark, _, rest = line.partition(" ")
        items = rest.split(" | ")
        if mark == "==":
            topics.append(Topic(rest))
            continue
        topic = topics[-1]
        if mark == "weight:":
            topic.weight = float(rest)
        elif mark in ("~", "=", "+"):
            {"~": topic.thoughts, "=": topic.answers, "+": topic.more}[mark].append(rest)
        elif mark == "!":
            topic.slots.setdefault("result", []).extend(items)
        elif mark == "?":
            topic.questions += items
        elif mark == ">":
            topic.after.setdefault(items[0], []).extend(items[1:])
        elif mark.endswith(":"):
            topic.slots.setdefault(mark[:-1], []).extend(items)
        else:
            raise ValueError(f"{path.name}: cannot read {line!r}")
    return topics


def _read_frames(path: Path) -> dict[str, list[str]]:
    """Frames by kind: `[kind]`, then lines of frames."""
    frames: dict[str, list[str]] = {}
    kind = ""
    for line in filter(None, _lines(path)):
        if line.startswith("["):
            kind = line.strip("[]")
        else:
            frames.setdefault(kind, []).extend(line.split(" | "))
    return frames


def _read_dialogues(path: Path) -> list[list[Exchange]]:
    """Conversations, one list of exchanges for each answer that can be learnt."""
    chats: list[list[Exchange]] = []
    so_far: list[Exchange] = []
    question = thought = ""
    for line in _lines(path):
        speaker, _, text = line.partition(": ")
        if not line:
            so_far = []
        elif speaker == "user":
            question, thought = text, ""
        elif speaker == "think":
            thought = text
        elif speaker == "quire":
            so_far = [*so_far, Exchange(question, thought, text)]
            chats.append(so_far)
        else:
            raise ValueError(f"{path.name}: cannot read {line!r}")
    return chats


class Corpus:
    """Everything in text/, and the stream of samples drawn from it."""

    def __init__(self, folder: Path) -> None:
        self.topics: list[Topic] = []
        for name in ("about", "words", "howto", "smalltalk", "unknown"):
            self.topics += _read_topics(folder / f"{name}.txt")
        self.by_name = {topic.name: topic for topic in self.topics}
        self.tools = _read_topics(folder / "tools.txt")
        self.frames = _read_frames(folder / "frames.txt")
        self.dialogues = _read_dialogues(folder / "dialogues.txt")
        self.systems = list(filter(None, _lines(folder / "systems.txt")))
        self.prose = " ".join(line or "\n" for line in _lines(folder / "prose.txt")).split(" \n ")
        self.words = sorted(
            {w for t in self.topics for a in t.answers for w in re.findall(r"\w+", a)}
        )
        self._weights = [topic.weight for topic in self.topics]
        self._follow_ups = [(t, name) for t in self.topics for name in t.after]
        for topic in self.topics:
            if not (topic.questions and topic.thoughts and topic.answers):
                raise ValueError(f"topic {topic.name} lacks questions, thoughts or answers")

    # -- questions -------------------------------------------------------------------------------

    def _framed(self, topic: Topic) -> list[tuple[str, str]]:
        """The kinds of frame and of slot that fit the topic."""
        if topic.name == "unknown":
            return [(f"unknown {kind}", kind) for kind in ("things", "people", "deeds")]
        return [(kind, kind) for kind in SLOT_KINDS if kind in topic.slots]

    def question(self, topic: Topic, rng: random.Random) -> str:
        """A question of the topic: as written, or a frame with a slot in it."""
        framed = self._framed(topic)
        if not framed or rng.random() < 0.5:
            return rng.choice(topic.questions)
        frame_kind, slot_kind = rng.choice(framed)
        slots = topic.slots[slot_kind]
        first, second = rng.choice(slots), rng.choice(slots)
        if topic.name == "unknown" and rng.random() < 0.3:
            first = generated.made_up_word(rng)
        return fill(rng.choice(self.frames[frame_kind]), first, second)

    def all_questions(self) -> set[str]:
        """Every question that can be drawn, normalised, without greetings and typing errors."""
        found = {q for topic in self.topics for q in topic.questions}
        for topic in self.topics:
            for frame_kind, slot_kind in self._framed(topic):
                for slot in topic.slots[slot_kind]:
                    found.update(fill(frame, slot, slot) for frame in self.frames[frame_kind])
        found.update(chat[-1].question for chat in self.dialogues)
        return {normalise(question) for question in found}

    def _worded(self, exchange: Exchange, rng: random.Random) -> Exchange:
        """The question as somebody may type it: with a greeting, lower case, typing errors."""
        if exchange.verbatim:
            return exchange
        question = exchange.question
        if rng.random() < 0.2:
            question = f"{rng.choice(self.frames['before'])} {question}"
        if rng.random() < 0.15:
            question = f"{question} {rng.choice(self.frames['after'])}".replace(" ,", ",")
        return replace(exchange, question=generated.typed(question, rng))

    # -- conversations ---------------------------------------------------------------------------

    def _exchange(self, topic: Topic, question: str, rng: random.Random) -> Exchange:
        return Exchange(question, rng.choice(topic.thoughts), rng.choice(topic.answers))

    def _fresh(self, rng: random.Random) -> Exchange:
        if rng.random() < 0.06:
            return Exchange(*generated.exercise(rng, self.words), verbatim=True)
        topic = rng.choices(self.topics, self._weights)[0]
        return self._exchange(topic, self.question(topic, rng), rng)

    def _follow_up(self, rng: random.Random) -> list[Exchange]:
        """Two exchanges, the second of which is understood through the first."""
        topic, name = rng.choice(self._follow_ups)
        before = self.by_name[name]
        first = self._exchange(before, self.question(before, rng), rng)
        return [first, self._exchange(topic, rng.choice(topic.after[name]), rng)]

    def _tell_more(self, rng: random.Random) -> list[Exchange]:
        topic = rng.choice([topic for topic in self.topics if topic.more])
        thought = f"They want to know more about {topic.title}."
        more = Exchange(rng.choice(self.frames["more"]), thought, rng.choice(topic.more))
        return [self._exchange(topic, self.question(topic, rng), rng), more]

    def _and_another(self, rng: random.Random) -> list[Exchange]:
        """Any exchange, and then "And a block?"."""
        topic = rng.choice([topic for topic in self.topics if "term" in topic.slots])
        slot = rng.choice(topic.slots["term"])
        again = fill(rng.choice(self.frames["again"]), slot, slot)
        return [self._fresh(rng), self._exchange(topic, again, rng)]

    def _exchanges(self, rng: random.Random) -> list[Exchange]:
        kind = rng.random()
        if kind < 0.76:
            return [self._fresh(rng)]
        if kind < 0.81:
            return self._follow_up(rng)
        if kind < 0.85:
            return self._tell_more(rng)
        if kind < 0.90:
            return self._and_another(rng)
        if kind < 0.94:
            return rng.choice(self.dialogues)
        return [self._fresh(rng) for _ in range(rng.randint(2, 4))]

    def chat(self, rng: random.Random) -> Chat:
        exchanges = [self._worded(exchange, rng) for exchange in self._exchanges(rng)]
        thinking = bool(exchanges[-1].thought) and rng.random() < 0.5
        return Chat(exchanges, self._system(rng), thinking)

    def _system(self, rng: random.Random) -> str:
        return rng.choice(self.systems) if rng.random() < 0.2 else ""

    def tool_chat(self, rng: random.Random) -> Chat:
        """A question with tools at hand: a call, the use of its result, or no need of a tool."""
        topics = rng.sample(self.tools, rng.randint(1, 3))
        tools = [generated.tool(topic.slots, rng) for topic in topics]
        thinking, system = rng.random() < 0.5, self._system(rng)
        kind = rng.random()
        if kind < 0.3:
            return Chat([self._worded(self._fresh(rng), rng)], system, thinking, tools)
        topic, function = topics[0], tools[0]["function"]
        value = rng.choice(topic.slots["value"])
        question = rng.choice(topic.questions).replace("{v}", value)
        name, arguments = function["name"], {function["parameters"]["required"][0]: value}
        thought = topic.thoughts[0]
        if kind < 0.7:
            call = f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}'
            exchange = Exchange(question, thought, f"<tool_call>\n{call}\n</tool_call>")
        else:
            result = rng.choice(topic.slots["result"])
            result = result.replace("{n}", str(rng.randint(1, 30)))
            result = result.replace("{m}", str(rng.randint(0, 5)))
            use = ToolUse(name, arguments, thought if thinking else "", result)
            answer = f"The tool says about {value}: {result}"
            exchange = Exchange(question, "The tool has answered.", answer, tool_use=use)
        rng.shuffle(tools)
        return Chat([exchange], system, thinking, tools)

    def passage(self, rng: random.Random) -> str:
        """Plain text: paragraphs from a random sentence on, or the answer of a topic."""
        if rng.random() < 0.2:
            return rng.choice(rng.choice(self.topics).answers)
        sentences = re.split(r"(?<=\.) ", rng.choice(self.prose))
        text = " ".join(sentences[rng.randrange(len(sentences)) if rng.random() < 0.3 else 0 :])
        return f"{text}\n\n{rng.choice(self.prose)}" if rng.random() < 0.3 else text

    def sample(self, rng: random.Random) -> Chat | str:
        """A conversation, or a passage of plain text."""
        kind = rng.random()
        if kind < 0.08:
            return self.passage(rng)
        return self.tool_chat(rng) if kind < 0.13 else self.chat(rng)


def fill(frame: str, slot: str, other: str) -> str:
    """The frame with {t}, {b} and {u} filled: the slot, the slot bare of its article, another."""
    return frame.replace("{t}", slot).replace("{b}", ARTICLE.sub("", slot)).replace("{u}", other)


def normalise(question: str) -> str:
    """Return words in lower case: two questions with the same ones are the same."""
    return " ".join(re.findall(r"[a-z0-9]+", question.lower()))

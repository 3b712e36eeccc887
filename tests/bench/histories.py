"""Histories as agents send them: a whole conversation each time, as a chat template renders it.

The template is Qwen3.5's, in tokens: thoughts stand before an answer only where no person has asked
since; a tool's result is no question of a person, a reminder of the agent's is one.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import NamedTuple

from engine.types import Turns

VOCABULARY = 1 << 17
# What begins and ends a message, and stands before an answer.
USER, TOOL, ASSISTANT, THINK, END = (1, 2), (1, 3), (1, 4), (5, 6), (7, 8)


class Asked(NamedTuple):
    """A request."""

    prompt: list[int]
    system_tokens: int
    turns: Turns
    answer: int
    """Tokens of the answer, thoughts included."""


Script = Generator[Asked, list[int], None]
"""The requests of one agent; it is sent the tokens of each answer."""


@dataclass(frozen=True, slots=True)
class Message:
    """Tokens between a begin and an end."""

    head: tuple[int, ...]
    tokens: list[int]
    thoughts: int = 0
    """How many of the first tokens are thoughts."""


@dataclass(slots=True)
class Words:
    """Tokens that nobody has said before, as far as there are enough."""

    _next: "count[int]" = field(default_factory=count)

    def some(self, tokens: int) -> list[int]:
        return [10 + next(self._next) % (VOCABULARY - 10) for _ in range(tokens)]


@dataclass(slots=True)
class History:
    """One conversation so far."""

    words: Words
    system: list[int]
    messages: list[Message] = field(default_factory=list)

    def user(self, tokens: int) -> None:
        """A person asks, or the agent reminds the model of something."""
        self.messages.append(Message(USER, self.words.some(tokens)))

    def tool(self, tokens: int) -> None:
        """A tool has done what the model called it for."""
        self.messages.append(Message(TOOL, self.words.some(tokens)))

    def forget_thoughts(self) -> None:
        """The newest answer is sent without its thoughts from now on."""
        answer = self.messages.pop()
        self.messages.append(Message(ASSISTANT, answer.tokens[answer.thoughts :]))

    def ask(self, answer: int, thoughts: int = 0) -> Script:
        """Sends all of it, and adds the answer. answer: its tokens after the thoughts."""
        said = yield self.rendered(thoughts + answer)
        self.messages.append(Message(ASSISTANT, said, thoughts))

    def rendered(self, answer: int) -> Asked:
        """The prompt, and where others may leave it."""
        prompt = [*self.system]
        queries = [number for number, its in enumerate(self.messages) if its.head == USER]
        last, user_end = queries[-1], 0
        for number, message in enumerate(self.messages):
            prompt += message.head
            if message.head != ASSISTANT:
                prompt += message.tokens
            elif number > last:
                prompt += (*THINK, *message.tokens)
            else:
                prompt += message.tokens[message.thoughts :]
            prompt += END
            user_end = len(prompt) if number == last else user_end
        turns = Turns(user_end, len(prompt))
        return Asked([*prompt, *ASSISTANT, *THINK], len(self.system), turns, answer)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long things are, in tokens; by default as coding agents have them."""

    system: int = 14_000
    question: int = 400
    results: tuple[int, ...] = (300, 1800, 700, 4000, 150, 2500)
    """Of tools, in turn, more or less."""
    thoughts: int = 150
    answer: int = 60
    reminder: int = 120
    tools: int = 6
    """Calls after a question."""
    questions: int = 4
    """Of a person in a session; twice as many make it about twice as long."""

    def shorter(self, by: int) -> "Sizes":
        """The same, so many times shorter, but for the numbers of calls and questions."""
        results = tuple(its // by for its in self.results)
        parts = ("system", "question", "thoughts", "answer", "reminder")
        return replace(self, results=results, **{name: getattr(self, name) // by for name in parts})


@dataclass(slots=True)
class Agent:
    """Plays conversations of one size."""

    sizes: Sizes
    rng: Random
    words: Words

    def history(self, system: list[int]) -> History:
        return History(self.words, system)

    def system(self, part: float = 1.0) -> list[int]:
        """A system prompt with its tools; part: of the usual size."""
        return self.words.some(int(self.sizes.system * part))

    def question(self, history: History, calls: int | None = None) -> Script:
        """A person asks; the model calls tools, and answers."""
        sizes = self.sizes
        history.user(sizes.question)
        for number in range(sizes.tools if calls is None else calls):
            yield from history.ask(sizes.answer, sizes.thoughts)
            history.tool(self._result(number))
        yield from history.ask(2 * sizes.answer, sizes.thoughts)

    def _result(self, number: int) -> int:
        usual = self.sizes.results[number % len(self.sizes.results)]
        return max(1, int(usual * self.rng.uniform(0.5, 1.5)))

    # --- kinds of sessions ----------------------------------------------------------------------

    def plain(self, system: list[int]) -> Script:
        """20 turns of a model that does not think: each prompt goes on where the last one ended."""
        history = self.history(system)
        history.user(self.sizes.question)
        for number in range(20):
            yield from history.ask(self.sizes.answer)
            history.tool(self._result(number))

    def thinking(self, system: list[int], questions: int | None = None) -> Script:
        """Questions with tools; the next question drops the thoughts since the last one."""
        history = self.history(system)
        for _ in range(self.sizes.questions if questions is None else questions):
            yield from self.question(history)

    def reminded(self, system: list[int]) -> Script:
        """After every third result of a tool the agent reminds the model of something; that drops
        thoughts as a question does."""
        history, sizes = self.history(system), self.sizes
        history.user(sizes.question)
        for number in range(sizes.questions * sizes.tools):
            yield from history.ask(sizes.answer, sizes.thoughts)
            history.tool(self._result(number))
            if number % 3 == 2:
                history.user(sizes.reminder)

    def forgetful(self, system: list[int]) -> Script:
        """A client that never sends thoughts back: each prompt leaves the last one where its answer
        begins."""
        history, sizes = self.history(system), self.sizes
        history.user(sizes.question)
        for number in range(sizes.questions * sizes.tools):
            yield from history.ask(sizes.answer, sizes.thoughts)
            history.forget_thoughts()
            history.tool(self._result(number))

    def with_subagents(self, system: list[int]) -> Script:
        """Between two questions a subagent works, with a system prompt of its own."""
        history, other = self.history(system), self.system(0.3)
        for _ in range(self.sizes.questions):
            yield from self.question(history)
            yield from self.question(self.history(other), calls=8)

    def compacted(self, system: list[int]) -> Script:
        """A history that grows too long is replaced by a summary, twice."""
        history = self.history(system)
        for _ in range(3):
            for _ in range(self.sizes.questions - 1):
                yield from self.question(history)
            history.user(self.sizes.question)
            yield from history.ask(8 * self.sizes.answer, self.sizes.thoughts)
            answer = history.messages[-1]
            history = self.history(system)
            history.messages.append(Message(USER, answer.tokens[answer.thoughts :]))

    def short(self, system: list[int], conversations: int = 6) -> Script:
        """One conversation after the other, each of one question."""
        for _ in range(conversations):
            yield from self.question(self.history(system), calls=2)


def in_turn(scripts: Iterable[Script]) -> Generator[tuple[int, Asked], list[int], None]:
    """Yields the requests of several agents, each one's next in turn, with the agent's number."""
    waiting = [(number, script, next(script)) for number, script in enumerate(scripts)]
    while waiting:
        going = []
        for number, script, asked in waiting:
            said = yield number, asked
            try:
                going.append((number, script, script.send(said)))
            except StopIteration:
                continue
        waiting = going


Kind = Callable[[Agent], list[Script]]


def sessions(agent: Agent) -> dict[str, Callable[[], list[Script]]]:
    """Kinds of sessions, by what they are; the scripts of each are played in turn."""
    system = agent.system()

    def many(conversations: int) -> list[Script]:
        return [agent.thinking(system, 2) for _ in range(conversations)]

    return {
        "20 turns, no thoughts": lambda: [agent.plain(system)],
        "thoughts dropped": lambda: [agent.thinking(system)],
        "reminders": lambda: [agent.reminded(system)],
        "thoughts not sent": lambda: [agent.forgetful(system)],
        "subagents": lambda: [agent.with_subagents(system)],
        "compactions": lambda: [agent.compacted(system)],
        "two in turn": lambda: [agent.thinking(system), agent.thinking(system)],
        "eight in turn": lambda: many(8),
        "one and short ones": lambda: [agent.thinking(system, 3), agent.short(agent.system(0.5))],
    }

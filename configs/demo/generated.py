"""Text that is made by rule and not written: sums, counting, echoes, tools, typing errors."""

from __future__ import annotations

import random
from typing import Any

NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty",
)  # fmt: skip
SIGNS = {"+": ("plus", "add {a} and {b}"), "-": ("minus", "subtract {b} from {a}")}
SUM_FRAMES = (
    "What is {a} {s} {b}?", "what is {a} {s} {b}", "{a} {s} {b}", "{a}{s}{b}", "{a} {s} {b} = ?",
    "{a} {s} {b}?", "How much is {a} {s} {b}?", "how much is {a} {s} {b}", "calculate {a} {s} {b}",
    "What's {a} {s} {b}?", "what does {a} {s} {b} make", "{a} {w} {b}", "What is {a} {w} {b}?",
    "how much is {a} {w} {b}?", "what is {A} {w} {B}?", "{A} {w} {B}", "tell me {a} {s} {b}",
    "can you {c}?", "{c}", "please {c}", "What do you get when you {c}?", "compute {a} {s} {b}",
    "and {a} {s} {b}?", "solve {a} {s} {b}", "{a} {s} {b} is what?", "do you know {a} {s} {b}?",
)  # fmt: skip
ECHO_FRAMES = (
    "Say {x}", "say {x}", "Say: {x}", "Repeat after me: {x}", "repeat: {x}", "please say {x}",
    "Echo {x}", "repeat {x}", "Write {x}", "can you say {x}", 'Say "{x}"', "just say {x}",
)  # fmt: skip
COUNT_FRAMES = (
    "Count to {b}.", "count to {b}", "Can you count to {b}?", "count up to {b}", "Count to {B}",
    "count from one to {B}", "Count from 1 to {b}.", "please count to {b}", "count till {b}",
)  # fmt: skip
SYLLABLES = (
    "ba", "be", "bo", "bra", "cla", "cor", "da", "del", "do", "dri", "fa", "fen", "flo", "ga",
    "gor", "gra", "hi", "jo", "ka", "kel", "la", "lum", "ma", "mi", "mon", "na", "nor", "o",
    "pa", "pel", "pro", "qua", "ra", "rin", "ro", "sa", "sel", "sti", "ta", "ter", "tho", "tri",
    "u", "va", "ven", "vi", "wa", "wor", "xe", "ya", "zan",
)  # fmt: skip
NEIGHBOURS = {
    "a": "sq", "b": "vn", "c": "xv", "d": "sf", "e": "wr", "f": "dg", "g": "fh", "h": "gj",
    "i": "uo", "j": "hk", "k": "jl", "l": "ko", "m": "n", "n": "bm", "o": "ip", "p": "o",
    "q": "wa", "r": "et", "s": "ad", "t": "ry", "u": "yi", "v": "cb", "w": "qe", "x": "zc",
    "y": "tu", "z": "x",
}  # fmt: skip


def made_up_word(rng: random.Random) -> str:
    """Draw a new word, sometimes two."""
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(2, 4))) for _ in range(rng.randint(1, 2))]
    word = " ".join(words)
    return rng.choice((word, f"a {word}", f"the {word}", word.title()))


def exercise(rng: random.Random, words: list[str]) -> tuple[str, str, str]:
    """A sum, a count or an echo as (question, thought, answer)."""
    kind = rng.random()
    if kind < 0.6:
        return _sum(rng)
    if kind < 0.75:
        return _count(rng)
    return _echo(rng, words)


def _sum(rng: random.Random) -> tuple[str, str, str]:
    sign = rng.choice("++-")
    first, second = rng.randint(0, 12), rng.randint(0, 12)
    if sign == "-":
        first, second = first + second, second
        if first > 20:
            first, second = 20, min(second, 20)
    result = first + second if sign == "+" else first - second
    word, command = SIGNS[sign]
    question = rng.choice(SUM_FRAMES).format(
        a=first, b=second, s=sign, w=word, A=NUMBERS[first], B=NUMBERS[second],
        c=command.format(a=first, b=second),
    )  # fmt: skip
    answer = f"{first} {sign} {second} = {result}."
    return question, f"They want a sum. {answer}", answer


def _count(rng: random.Random) -> tuple[str, str, str]:
    end = rng.randint(2, 20)
    question = rng.choice(COUNT_FRAMES).format(b=end, B=NUMBERS[end])
    answer = ", ".join(str(number) for number in range(1, end + 1)) + "."
    return question, f"They want me to count to {end}.", answer


def _echo(rng: random.Random, words: list[str]) -> tuple[str, str, str]:
    parts = [
        made_up_word(rng) if rng.random() < 0.2 else rng.choice(words)
        for _ in range(rng.randint(1, 4))
    ]
    phrase = " ".join(parts)
    return rng.choice(ECHO_FRAMES).format(x=phrase), "They want me to say something.", phrase


def tool(slots: dict[str, list[str]], rng: random.Random) -> dict[str, Any]:
    """A function tool with one text argument, as a client of the OpenAI API describes it."""
    argument = rng.choice(slots["argument"])
    about = {"type": "string"}
    if rng.random() < 0.4:
        about["description"] = f"the {argument}"
    function = {
        "name": rng.choice(slots["name"]),
        "description": rng.choice(slots["about"]),
        "parameters": {"type": "object", "properties": {argument: about}, "required": [argument]},
    }
    return {"type": "function", "function": function}


def typed(text: str, rng: random.Random) -> str:
    """The text as a person types it: often without capitals or marks, now and then wrong."""
    if rng.random() < 0.3:
        text = text.lower()
    elif rng.random() < 0.03:
        text = text.upper()
    if rng.random() < 0.25:
        text = text.rstrip("?.! ") or text
    for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 0, 0, 1, 2))):
        text = _mistyped(text, rng)
    return text


def _mistyped(text: str, rng: random.Random) -> str:
    """The text with one letter lost, doubled, swapped with the next, or hit beside its key."""
    places = [i for i in range(len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if not places:
        return text
    at = rng.choice(places)
    letter, following = text[at], text[at + 1]
    wrong = NEIGHBOURS.get(letter.lower(), letter)
    swap = (
        following,
        letter + letter + following,
        following + letter,
        rng.choice(wrong) + following,
    )
    return text[:at] + rng.choice(swap) + text[at + 2 :]

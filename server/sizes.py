"""Amounts of memory as people write them."""

import re
from fractions import Fraction
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

SIZE = re.compile(r"([0-9]{0,20}\.?[0-9]{1,20})\s*(?:([kmgtp])(i?)b?|b)?", re.IGNORECASE)
POWERS = " kmgtp"


def parse_size(value: object) -> int:
    """Parse a size in bytes. ``4.5GiB``, ``4 gib``, ``4G`` (10^9) and ``65536`` are sizes; a text
    with anything else is none. Raises PydanticCustomError, a ValueError."""
    found = SIZE.fullmatch(str(value).strip())
    if found is None:
        raise PydanticCustomError(
            "size",
            "this is no size: write a number and a unit, such as 4.5GiB or 512MiB, or a number of "
            "bytes, such as 65536",
        )
    number, prefix, binary = found.groups()
    base = 1024 if binary else 1000
    return int(Fraction(number) * base ** POWERS.index((prefix or " ").lower()))


Size = Annotated[int, BeforeValidator(parse_size)]
"""A setting in bytes."""

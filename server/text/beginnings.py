"""Find at the end of a growing text what may be the beginning of a known string."""


def longest_beginning(text: str, *starts: str) -> int:
    """Return the length of the longest end of the text that begins one of the strings, but is not
    all of it."""
    longest = 0
    for each in starts:
        place = text.find(each[0], max(0, len(text) - len(each) + 1))
        while place >= 0 and not each.startswith(text[place:]):
            place = text.find(each[0], place + 1)
        if place >= 0:
            longest = max(longest, len(text) - place)
    return longest

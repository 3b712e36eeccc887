"""What was seen, beside what should be."""

COLUMNS = ("router", "hits", "equal answers", "first token, ms", "seconds")


class Results:
    """Prints checks as they are made, and a table at the end."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0
        self._rows: list[tuple[str, ...]] = [COLUMNS]

    def check(self, what: str, good: bool, seen: object = "") -> None:
        """Print a line; a bad one fails the run."""
        self.passed += good
        self.failed += not good
        print(f"{'ok    ' if good else 'FAILED'}  {what}{f': {seen}' if seen else ''}", flush=True)

    def row(self, *cells: str) -> None:
        """Add a line to the table."""
        self._rows.append(cells)

    def print_table(self) -> None:
        """Print the table, and how many checks there were."""
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        for row in self._rows:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)))
        print(f"{self.passed} passed, {self.failed} failed")

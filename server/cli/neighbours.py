"""Other packages of the names that quire's have: one overwrites files of the other."""

from importlib.metadata import distributions

PACKAGES = ("server", "engine", "kvcache", "metal_ext")
OURS = "quire"


def neighbours() -> str | None:
    """Return one sentence on what else is installed here under quire's names; None if nothing is.

    Records of installed files are searched as text: to parse all of them would take longer than
    everything else of a start.
    """
    found: dict[str, list[str]] = {}
    for distribution in distributions():
        files = "\n" + (distribution.read_text("RECORD") or "")
        packages = [name for name in PACKAGES if f"\n{name}/" in files or f"\n{name}.py," in files]
        if packages and (whose := distribution.metadata["Name"]) != OURS:
            for package in packages:
                found.setdefault(package, []).append(whose)
    if not found:
        return None
    others = ", ".join(f"`{package}` of {' and '.join(of)}" for package, of in found.items())
    return (
        f"quire shares its place with {others}, and one overwrites files of the other: install "
        "quire where it is alone (uv tool install, pipx)"
    )

"""``quire launch``: a coding tool that knows address, model and context window of a server."""

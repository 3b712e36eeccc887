"""The HTTP application and its socket: guards, errors, start and end, and the log of requests."""

"""Guards between the socket and the routes; each refuses one kind of request. From the outermost to
the innermost: connections.py, hosts.py (Host before Origin), keys.py, answers.py, body.py."""

"""Guards stand between the socket and the routes, and refuse requests. A request passes them in the
order connections.py, hosts.py (first Host, then Origin), keys.py, answers.py, body.py."""

"""Guards between the socket and the routes; each refuses what is not allowed.

From outside: connections and their deadlines, Host, Origin, key, drain and bugs, body, routes.
"""

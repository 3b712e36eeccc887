"""What stands between the socket and the routes: whatever is not allowed is refused.

From outside: connections and their deadlines, Host, Origin, key, the drain, bugs, body, routes.
"""

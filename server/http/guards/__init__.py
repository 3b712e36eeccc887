"""Guards between the socket and the routes; each refuses one kind of request. From the outermost:
connections and deadlines, Host, Origin, key, drain and bugs, body."""

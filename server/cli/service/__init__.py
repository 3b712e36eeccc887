"""``quire service``: quire starts when its user logs in, and again when it has failed."""

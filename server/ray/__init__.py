"""``quire cluster``: replicas on several machines, behind one address."""

"""``quire cluster``: serves replicas of a model on several machines behind one address, on Ray."""

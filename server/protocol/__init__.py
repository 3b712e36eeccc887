"""Wire formats: validated requests, and answers as dictionaries."""

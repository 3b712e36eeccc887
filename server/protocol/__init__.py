"""JSON formats of all APIs: validated requests, and answers as dictionaries."""

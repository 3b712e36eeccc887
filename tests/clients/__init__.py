"""What clients really use, client by client: ``make clients``."""

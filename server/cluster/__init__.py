"""Several machines that serve one model: which of them a request goes to."""

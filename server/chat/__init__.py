"""Generate the answers to a conversation or a prompt of any API."""

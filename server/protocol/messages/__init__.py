"""The wire format of /v1/messages, as Anthropic defines it."""

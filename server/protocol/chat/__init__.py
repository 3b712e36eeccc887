"""The wire format of /v1/chat/completions."""

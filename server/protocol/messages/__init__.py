"""/v1/messages, as Anthropic has it."""

"""Read tool calls from a model's text, and keep their text for later prompts."""

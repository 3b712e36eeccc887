"""From a conversation or a prompt to its answers, whatever API it came by."""

"""Turn a conversation or a prompt of any API into its answers."""

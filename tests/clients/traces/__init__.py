"""Conversations as agents resend them, and what of each prompt was computed again."""

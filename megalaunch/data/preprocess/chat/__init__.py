"""Conversations to tokens and loss masks."""

"""Tokens per second: what `windlass bench` measures."""

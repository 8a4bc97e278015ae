"""Tokens per second, measured by `windlass bench`."""

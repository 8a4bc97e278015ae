"""Backends: modules with the same functions as `reference`, which is the truth."""

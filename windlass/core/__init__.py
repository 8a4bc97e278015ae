"""Words that all rooms share: shapes, errors, records. It imports nothing of ours."""

__version__ = "0.1.0"

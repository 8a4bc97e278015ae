"""Words that all rooms share: shapes, errors, records. It imports nothing of ours."""

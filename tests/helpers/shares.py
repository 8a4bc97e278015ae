"""Shares of the budget for a model of two layers of three kv heads."""

APART = [[1.5, 0.5, 1.5], [0.25, 0.25, 2.0]]  # heads that lie together are no neighbours in the first layer
ALIKE = [[1.0, 1.0 + 1e-6, 1.0]] * 2  # groups of heads, all with the budget

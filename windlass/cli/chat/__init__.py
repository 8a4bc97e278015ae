"""`windlass chat`: a conversation on one cache."""

"""Many processes, on one machine or more, through Ray: evaluations that are spread over workers."""

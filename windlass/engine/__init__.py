"""Reading prompts and writing text with an attached model."""

"""Everything that knows transformers: attaching to a model, and caches that travel to and from files."""

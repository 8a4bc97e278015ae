"""Everything that knows transformers: loading and attaching models, `KVCache`, conversion, prompt-cache files."""

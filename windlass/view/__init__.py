"""The live view: the tokens in a cache, as frames, recordings of them, and the page that shows both."""

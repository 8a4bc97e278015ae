"""The live view: what a cache holds, as frames; recordings of them; the page that shows both."""

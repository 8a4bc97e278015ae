"""`windlass tune`: which policy, store and positions serve a model and a text best in so many bytes.

fit_bytes.py   from bytes to tokens
candidates.py  the caches that are tried, and the text they are tried on
run.py         rounds of measuring; half of the candidates leave after each
ranking.py     who did best, how sure that is, and the line to paste
"""

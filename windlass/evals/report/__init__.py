"""The report: results files in, one HTML page and its figures out. Reads only what `windlass eval` wrote.

summaries.py  cases to means, intervals and the verdict
plots.py      figures; the only file that knows matplotlib
page.py       the page, by the templates, and its files
"""

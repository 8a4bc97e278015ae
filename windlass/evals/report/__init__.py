"""The report: results files in, one HTML page and its figures out. Reads only what `windlass eval` wrote.

read.py       lines to cases
summaries.py  cases to means and intervals
plots.py      figures; the only file that knows matplotlib
page.py       the HTML
make.py       all of it
"""

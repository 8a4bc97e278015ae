"""Tables in Markdown, written out by hand."""

from windlass.evals.report.page import padded, row, table, top


def test_a_table_by_hand():
    heads, rows = ["a", "b", "c"], [["1", "2", "3"], ["x", "", "z"]]
    assert table(heads, rows) == "| a | b | c |\n| --- | --- | --- |\n| 1 | 2 | 3 |\n| x |  | z |"
    assert table(heads, rows, 1).splitlines()[1] == "| --- | ---: | ---: |"
    assert table(heads, rows, 2, number="--:").splitlines()[1] == "| --- | --- | --: |"
    assert "\n".join([*top(heads, 0), *map(row, rows)]) == table(heads, rows, 0)


def test_a_padded_table_by_hand():
    lines = [{"name": "one|two", "t/s": "1.5"}, {"name": "b", "t/s": "10.25"}]
    assert padded(lines, {"t/s"}).splitlines() == [
        "| name     |   t/s |",
        "| -------- | ----: |",
        "| one\\|two |   1.5 |",
        "| b        | 10.25 |",
    ]

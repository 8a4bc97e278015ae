"""How the small models were trained that read texts in our tests: `python -m training --help`."""

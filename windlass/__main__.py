"""`python -m windlass`: the command line."""

from windlass.cli.program import run

if __name__ == "__main__":
    run()

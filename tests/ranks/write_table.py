"""The case that writes the table of docs/distributed.md, beside those that tests run."""

from combinations import write_table


def case_table():
    write_table()

"""``titans reproduce``: the paper's tables and figures by one command, at any size.

A study (studies.py) defines the runs that a table needs, and their measures. All processes that see the folder share
the work of training or resuming the runs (runs.py, claims.py, work.py). Each finished run has a record (records.py), a
small file. Tables (tables.py) and the summary (page.py) are made from the records alone.
"""

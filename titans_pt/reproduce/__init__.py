"""``titans reproduce``: the paper's tables and figures by one command, at any size.

A study (studies.py) says which runs a table needs and what is measured of each. Runs (runs.py) are trained, or resumed,
by as many processes as see the folder (claims.py, work.py); of each finished one there is a record (records.py), a
small file. Tables (tables.py) and the summary (page.py) are made of the records alone.
"""

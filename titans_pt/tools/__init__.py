"""Small tools for all packages here: whole files, records, statistics, figures.

Of our code they import only the error class, and they do not import torch, so that the many processes of
``titans prepare`` can use them.
"""

"""The fast way of a generated token on a CPU, put on a model from outside; one file for each kind of layer.

A mixer NAME.py has its plan in the file of the same name here, which registers it for the class; without one a token
goes the ordinary way. A mixer outside this repository registers its own with ``plans`` in any module that is imported.
"""

from titans_pt.token_plans.block import put_on
from titans_pt.token_plans.mixers import plans

__all__ = ["plans", "put_on"]

"""Fast path for a generated token on a CPU, put on a model from outside; one file for each kind of layer.

A mixer NAME.py has its plan in the file of the same name here, which registers it for the class; without a plan a token
takes the ordinary path. A mixer outside this repository registers its own with ``plans`` in any imported module.
"""

from titans_pt.token_plans.block import put_on
from titans_pt.token_plans.mixers import plans

__all__ = ["plans", "put_on"]

"""Imitate a rented GPU machine: only PyTorch, its dependencies and BARE_MACHINE_HAS can be imported.

Python imports a module of this name when it starts, if its folder is in PYTHONPATH.
"""

import os
import sys
from importlib.machinery import PathFinder

# PyTorch and Triton with what they need; pytest, its plugins and hypothesis; matplotlib; PyYAML and click.
ALWAYS = """
torch torchgen functorch triton numpy sympy mpmath networkx jinja2 markupsafe filelock fsspec
typing_extensions setuptools pkg_resources _distutils_hack pytest _pytest py pluggy iniconfig packaging
pygments pytest_timeout xdist execnet hypothesis sortedcontainers attr anyio sniffio idna matplotlib
mpl_toolkits pylab PIL cycler kiwisolver contourpy pyparsing dateutil six fontTools yaml _yaml click
"""
THERE = {*ALWAYS.split(), *os.environ.get("BARE_MACHINE_HAS", "").split()}


class Bare(PathFinder):
    """A path finder that hides the packages of site-packages that a bare machine lacks."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = super().find_spec(name, path, target)
        installed = found is not None and "site-packages" in str(found.origin or list(found.submodule_search_locations))
        return None if installed and path is None and name not in THERE else found


sys.meta_path[sys.meta_path.index(PathFinder)] = Bare

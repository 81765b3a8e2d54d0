"""Functions on tensors: no modules, no settings, no import of the other packages of this project."""

"""ELDR: a decode router that sends each MoE request to the worker whose batch shares its experts.

Importing this package loads nothing heavy: neither torch, vLLM nor NumPy.
"""

__version__ = "0.1.0"

"""Autotuning and code generation for replay kernels of state space models."""

__version__ = "0.1.0"

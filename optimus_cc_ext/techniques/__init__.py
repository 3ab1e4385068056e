"""Techniques: compression of each class of traffic, with the process groups, messages and state that it needs.

Imports compressors, config, metrics and torch.distributed, never Megatron or hooks. Start reading at `session.py`,
which steps the techniques of one model; `technique.py` is their base class, and each technique has a module of its own.
"""

"""Measurements and log lines: bytes by class of traffic, compression errors, residual norms and the time of
compressing.

May import `config` and `compressors`, but no process group and no Megatron. Start reading at `report.py`, which adds up
the ranks' rows and writes the log lines; `gauge.py` measures one technique.
"""

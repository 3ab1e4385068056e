"""State of the techniques in checkpoints: residuals and low-rank factors, saved beside Megatron's files and restored.

May import `config` and torch.distributed, but no technique, hook or Megatron. Start reading at `beside.py`; `saving.py`
and `loading.py` hold the steps that all ranks take together, `state_files.py` the file format, `resuming.py` the rules
for what is restored.
"""

"""Triton kernels of the compressors, for GPUs.

Imports triton, torch and the torch versions of the compressors. Start reading at `low_rank.py` and `blocks.py`, which
replace torch's compressor and codec: `launches` calls the low-rank kernels in `kernels`, and `block_kernels` has those
of the block formats. `trial` compares all of them with torch when a run starts.
"""

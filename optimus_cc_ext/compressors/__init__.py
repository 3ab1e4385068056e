"""Compressors: low-rank factorisation of batches of matrices, and formats with blocks of values in few bits.

Mathematics on tensors only: this folder imports torch, but neither Megatron nor torch.distributed nor other folders of
the package. Start reading at `low_rank.py` for PowerSGD's phases, at `formats.py`, which does not even need torch, and
`blocks.py` for blocks. `fast.py` chooses between torch and the Triton kernels of triton/.
"""

"""Mathematics on tensors: low-rank compression of batches of matrices, and blocks of values in few bits.

Imports neither Megatron nor torch.distributed; `formats`, the table of block formats, not even torch.
"""

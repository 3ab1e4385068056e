"""Sums, gathers and exchanges in few bits over torch.distributed.

This room knows tensors and process groups; it knows no configuration, no session and no Megatron. Start reading at
`exchange.py`, which has the steps of a sum.
"""

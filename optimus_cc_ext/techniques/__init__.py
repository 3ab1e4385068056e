"""One module per technique: what is sent and what is remembered. Uses torch.distributed, never Megatron."""

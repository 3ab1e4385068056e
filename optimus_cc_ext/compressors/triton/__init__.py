"""What GPUs compute themselves: `kernels`, the `launches` that call them, and `low_rank`, which fulfils `LowRank`;
`block_kernels`, and `blocks`, which calls them and fulfils `Codec`."""

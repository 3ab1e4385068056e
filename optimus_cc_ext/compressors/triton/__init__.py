"""The low-rank step on GPUs: `kernels`, the `launches` that call them, and `low_rank`, which fulfils `LowRank`."""

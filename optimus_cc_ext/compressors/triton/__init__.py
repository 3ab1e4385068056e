"""Triton's kernels for GPUs: `kernels`, the `launches` that call them, and `low_rank`, a `LowRank` that uses these;
`block_kernels`, and `blocks`, a `Codec` that uses those. `trial` compares them with torch when a run starts."""

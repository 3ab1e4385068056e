"""The device that a rank computes on where it has not a GPU of its own: a CPU, or a part of a GPU."""

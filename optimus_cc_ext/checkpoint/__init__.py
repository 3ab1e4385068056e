"""The techniques' state in a checkpoint: its files, and what of it a run goes on from."""

"""`optimus-cc patch`: puts a block of ours into an entry script of any fork of Megatron, and takes it out again.

`place.py` finds the place, `block.py` edits bytes, and `command.py` reads and writes the files. Only `cli` may import
this folder.
"""

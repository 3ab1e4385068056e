"""What holds for every test: no network, and one thread per process unless the caller says otherwise.

The default time limit of a test is in pytest.ini.
"""

import os

# Set at import, before a test module imports torch or transformers, which read them once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

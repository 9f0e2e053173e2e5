"""What must be said before torch is loaded."""

import os

# On ARM torch allocates with mimalloc, which gives memory back 10 ms after it is freed: every client's rows would be asked for anew.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")  # milliseconds

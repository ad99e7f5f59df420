"""One thin module for each DVC stage."""

import os

# Read by OpenMP when torch is loaded. Its threads otherwise wait by spinning: where another
# process has a core, two of them are ten times slower than one. The numbers are the same.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

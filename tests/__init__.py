"""Tests of mpshard; the folders mirror the package. Files under `mpi/` named `rank_*.py` run inside ranks."""

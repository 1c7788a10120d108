"""`mpshard verify`: the same training on different numbers of ranks and with different options, compared bit by bit.

`jobs` starts the runs and imports no MPI; `dump` is what each rank of a run does; `compare` is arithmetic on what they left.
"""

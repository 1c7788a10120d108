"""What the launcher (mpirun, srun) told this process through its environment, before or without MPI.

With it the ranks of a job that cannot start MPI still speak with one voice, and a rank that found itself alone in its
world, though it was started as one of many, is noticed: the usual sign of a launcher that belongs to another MPI.
"""

from __future__ import annotations

import os

# Open MPI's mpirun; MPICH's and its kin's, and srun --mpi=pmi2; MVAPICH's; Cray's PALS; PMIx servers; srun.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "PMIX_RANK", "SLURM_PROCID")
# Of Slurm the step's number of tasks, not SLURM_NTASKS: that one is the allocation's, also where mpirun, or a single
# process of the batch script, runs inside it.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def rank() -> int:
    """This process's rank as the launcher numbers it; 0 without a launcher."""
    return next((int(os.environ[name]) for name in _RANKS if os.environ.get(name, "").isdigit()), 0)


def launched() -> bool:
    """Whether a launcher started this process."""
    return any(os.environ.get(name, "").isdigit() for name in _RANKS if name != "SLURM_PROCID")


def wrong_world(size: int) -> str | None:
    """What is wrong with a world of `size` ranks, in one line; None if it is as the launcher meant it.

    Launchers nest (mpirun inside a Slurm step starts one helper a node), so the world is right if any of them meant it.
    """
    meant = {name: int(os.environ[name]) for name in _SIZES if os.environ.get(name, "").isdigit()}
    if not meant or size in meant.values():
        return None
    name, number = next(iter(meant.items()))
    remedy = ("srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH" if name.startswith("SLURM")
              else "use the mpirun beside this Python, or install the MPI that mpirun belongs to")
    return (f"started as one of {number} ranks ({name}={number}) but this MPI sees a world of {size}: "
            f"the launcher belongs to another MPI; {remedy}")

"""Who talks to whom: the world of this job and the sub-communicators that sharding uses."""

from __future__ import annotations

import os

from mpi4py import MPI

from mpshard.config import ConfigError
from mpshard.device.blas import available_cores


class Mesh:
    """The ranks that train one model together.

    Attributes
    ----------
    comm: all of them; a duplicate of the caller's communicator, so that messages of the caller and of mpshard
        cannot meet.
    rank, world: this rank's number and the number of ranks.
    node: those of them that share this rank's memory.
    group: the `dp_shard` consecutive ranks among which a unit is gathered (all, unless sharding is hybrid).
    replicas: the ranks with this one's place in the other groups, which hold the same part of a unit; each of them
        owns one piece of it.
    slices: all ranks, numbered by the slice of a unit that they own; `slice` is this rank's.
    cores: how many this rank may keep busy without disturbing the others.
    """

    def __init__(self, comm: MPI.Comm, dp_shard: int = 0) -> None:
        """dp_shard: ranks of a group, a divisor of the world; 0 for all of them."""
        # Communicators are made serially and in one order: concurrent Comm_dup calls hang Open MPI (ompi#2427).
        self.comm = comm.Dup()
        self.rank, self.world = self.comm.rank, self.comm.size
        self.node = self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        size = dp_shard or self.world
        if self.world % size:
            raise ConfigError(f"mesh.dp_shard={size} does not divide the {self.world} ranks")
        index, place = divmod(self.rank, size)
        self.slice = place * (self.world // size) + index
        self.group, self.replicas = self.comm.Split(index, place), self.comm.Split(place, index)
        self.slices = self.comm.Split(0, self.slice)
        # Ranks bound to the same cores share them; ranks bound apart do not.
        mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.cores = max(1, available_cores() // self.node.allgather(mine).count(mine))

    def neighbours(self, size: int) -> MPI.Comm:
        """The `size` consecutive ranks of this one's group that keep a unit among themselves. Collective.

        Raises ConfigError, on every rank, unless they are fewer than the group and divide it.
        """
        if size >= self.group.size or self.group.size % size:
            remedy = "use true, or a smaller divisor" if size >= self.group.size else "use a divisor"
            raise ConfigError(f"shard.reshard_after_forward={size}: units are gathered among {self.group.size} ranks; {remedy}")
        return self.group.Split(self.group.rank // size, self.group.rank)

    @property
    def node_rank(self) -> int:
        return self.node.rank

    @property
    def ranks_on_node(self) -> int:
        return self.node.size

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.world}, {self.ranks_on_node} on this node)"

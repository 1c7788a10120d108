"""What a configuration costs, before it runs: bytes a rank holds and moves, from the layout and the program alone.

Pure: no MPI, no arrays. The engine executes the very program that is counted here, and a test holds the two together.
"""

from mpshard.plan.activations import activation_bytes
from mpshard.plan.costs import Plan, plan
from mpshard.plan.of_config import fewest_ranks, plan_of, plans

__all__ = ["Plan", "activation_bytes", "fewest_ranks", "plan", "plan_of", "plans"]

"""What a run does when something goes wrong: ends everywhere and says why, or goes on.

`watchdog` ends a job that has stalled; `preempt` leaves in good order when asked to; `guard` judges losses and gradient
norms; `integrity` compares what ranks hold alike; `alike` refuses ranks that differ from the start; `stragglers` names
the rank that the others wait for; `supervise` starts jobs and starts them again.
"""

from mpshard.recover.status import REQUEUE, STALLED, STOPPED, Ended

__all__ = ["REQUEUE", "STALLED", "STOPPED", "Ended"]

"""The training loop: step, judge, log, evaluate, save; leave when asked to; end for good with a marker."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpshard.checkpoint import publish
from mpshard.checkpoint.resume import is_run, resume, set_aside
from mpshard.checkpoint.saver import Saver
from mpshard.comm import collectives
from mpshard.comm.agree import agree, on_root
from mpshard.config import Config, ConfigError, flat, to_toml
from mpshard.observe.metrics import MetricsFile, cut_after
from mpshard.optim import learning_rate
from mpshard.recover import integrity
from mpshard.recover.alike import check_program, check_start
from mpshard.recover.guard import Guard, Verdict
from mpshard.recover.preempt import Preemption
from mpshard.recover.status import REQUEUE, STOPPED, Ended
from mpshard.recover.stragglers import Stragglers, spread
from mpshard.recover.watchdog import Watchdog
from mpshard.shard import StepOutput
from mpshard.tracing import Tracing
from mpshard.train import Job, build, evaluate, sample_text, weights_to_show

if TYPE_CHECKING:
    from mpi4py import MPI

DONE = "done.json"  # in the run directory: all steps are done, the last checkpoint is written


def run(config: Config, comm: MPI.Comm) -> float | None:
    """Build and train; a run directory that holds a run already is refused before anything else happens.

    Raises
    ------
    ConfigError, on every rank: what the user must change. Ended, on every rank: preempted (status 75), or stopped by the
    guard (1). A stalled job does not return: the watchdog ends it.
    """
    on_root(comm, lambda: _may_run(config))
    check_start(comm, config)
    with Watchdog(comm, Path(config.run.dir), config.run.timeout) as watchdog, Preemption(watchdog.hurry) as preemption:
        job = build(config, comm)
        watchdog.say, watchdog.engine = job.console.say, job.sharded.engine
        return Loop(job, watchdog, preemption).run()


class Loop:
    """What is needed between two steps. Everything is collective.

    step: steps done. position: samples seen, over all ranks; the place in the endless stream of `mpshard.data`.
    """

    def __init__(self, job: Job, watchdog: Watchdog, preemption: Preemption) -> None:
        self.job, self.watchdog, self.preemption = job, watchdog, preemption
        self.config, self.sharded, self.optim, self.console = job.config, job.sharded, job.optim, job.console
        c, self.comm, self.folder = job.config, job.sharded.mesh.comm, Path(job.config.run.dir)
        check_program(self.sharded, c.train.global_batch_size // (c.train.micro_batch_size * self.comm.size))
        begun = resume(c.run.resume, self.folder, self.sharded, self.optim, flat(c), self.console.say)
        self.step, self.position = begun.step, begun.position
        self.evaluation: float | None = None
        self.guard = Guard(c.guard)
        on_root(self.comm, lambda: _open_run(c, self.step))
        self._open_metrics(self.step)
        self.saver = Saver(self.folder / "checkpoints", self.sharded, self.optim, c.checkpoint, flat(c), job.data.tokenizer.files(),
                           job.data.tokenizer.special_ids)
        self.tracing = Tracing(self.sharded, self.folder / "trace.json", c.run.trace_steps) if c.run.trace else None
        self.stragglers = Stragglers(self.comm.allgather(socket.gethostname()))
        self.checksums = integrity.Checksums(self.sharded, self.optim) if c.guard.checksums else None

    # -- the loop ----------------------------------------------------------------------------
    def run(self) -> float | None:
        """All steps that are left. Returns the last evaluation loss of this call."""
        c, steps = self.config, self.config.train.steps
        self.console.start(steps, self.step)
        with ExitStack() as closing:
            closing.callback(self.console.stop)
            closing.callback(lambda: self.metrics.close())
            if self._evaluates_at(self.step) and not self.evaluated:  # preempted between the step and its evaluation
                self._evaluate()
            while self.step < steps:
                verdict, asked = self._one_step()
                if verdict is not None and verdict.action == "rollback":
                    self._roll_back(verdict)
                    continue
                if verdict is not None and verdict.action == "stop":
                    self._event("stop", verdict.why)
                    self.saver.wait()
                    raise Ended(STOPPED, f"stopped before the update of step {self.step}: {verdict.why}; "
                                         f"the weights are those of step {self.step - 1}")
                if c.guard.check_every and self.step % c.guard.check_every == 0:
                    self.watchdog.at("the comparison of what ranks hold", waits=True)
                    integrity.compare(self.sharded, self.optim, self.position)
                if self._evaluates_at(self.step) and not asked:
                    self._evaluate()
                self._save(asked)
                if asked and self.step < steps:
                    self.preemption.asked = True  # whoever was told: launchers may end the others when the first has left
                    self._event("preempted", "asked to leave; run again with run.resume=auto")
                    raise Ended(REQUEUE, f"asked to leave: checkpoint written at step {self.step} of {steps}; "
                                         "run the same with run.resume=auto to go on")
            self.watchdog.at("the end")
            self.saver.wait()
        if self.tracing is not None:
            self.tracing.close()
        if c.train.sample_tokens:
            with weights_to_show(self.job):
                text = sample_text(self.job)
            self.console.say(text)
        on_root(self.comm, lambda: write_done(self.folder, {"step": self.step, "eval_loss": self.evaluation,
                                                            "world_size": self.comm.size}))
        return self.evaluation

    def _one_step(self) -> tuple[Verdict | None, bool]:
        """Make the next step, unless the guard has an objection. Returns that, and whether any rank was asked to leave."""
        c, job, number, size = self.config, self.job, self.step + 1, self.config.train.global_batch_size
        self.watchdog.at("reading data", number)
        start = time.perf_counter()
        batch = job.data.train.step_batch(self.position, size, c.train.micro_batch_size, self.comm.rank, self.comm.size)
        self.watchdog.at("the sums over ranks", waits=True)
        output = self.sharded.step(batch)
        self.optim.lr = learning_rate(self.step, peak=c.optim.lr, steps=c.train.steps, warmup=c.optim.warmup_steps,
                                      schedule=c.optim.schedule, floor=c.optim.min_lr_ratio)
        updating = time.perf_counter()
        verdict = self.guard.judge(output.loss, output.grad_norm, scaled=self.sharded.loss_scale is not None)
        if verdict is None:
            self._update(output)
        end = time.perf_counter()
        self.step, self.position = number, self.position + size
        self.watchdog.at("the figures of all ranks", waits=True)
        record, slow, asked = self._record(output, end - start, end - updating)
        self.watchdog.took(end - start)
        if self.tracing is not None:
            self.tracing.done(number, start, updating, end)
        if verdict is not None:
            if verdict.action == "skip":
                self._event("skip", verdict.why)
        elif number % c.train.log_every == 0 or number == c.train.steps:
            self.metrics.write(record)
        if slow:
            self._event("slow", slow)
        self.console.advance(number, output.loss, record["tokens_per_s"])
        return verdict, asked

    def _update(self, output: StepOutput) -> None:
        self.watchdog.at("the update")
        if self.checksums is not None:
            self.checksums.verify()
        self.optim.step(output)
        if self.checksums is not None:
            self.checksums.updated()

    # -- between steps -----------------------------------------------------------------------
    def _record(self, output: StepOutput, step_s: float, optim_s: float) -> tuple[dict[str, Any], str | None, bool]:
        """The metrics line of a step: times and waits are the slowest rank's, bytes one rank's largest; what there is to
        say of a slow rank; whether any rank was asked to leave."""
        counters = asdict(output.counters)
        names = ["forward_s", "backward_s", "gather_wait_s", "reduce_wait_s", "bytes_gathered", "bytes_reduced"]
        wait = counters["gather_wait_s"] + counters["reduce_wait_s"]
        own = dict.fromkeys(names, 0.0) | {name: counters[name] for name in names} | {
            "step_s": step_s, "optim_s": optim_s, "peak_bytes": self.sharded.device.memory.peak(),
            "exposed": -output.counters.hidden_fraction, "work": step_s - wait, "wait": wait, "asked": self.preemption.asked}
        everyone = dict(zip(own, collectives.gather_all(self.comm, np.array([*own.values()], np.float64)).T, strict=True))
        most = {name: float(values.max()) for name, values in everyone.items()}
        record: dict[str, Any] = {"step": self.step, "loss": output.loss, "grad_norm": output.grad_norm, "lr": self.optim.lr,
                                  "tokens": output.tokens, "step_s": most["step_s"], "tokens_per_s": output.tokens / most["step_s"]}
        record |= {name: most[name] for name in ("forward_s", "backward_s", "optim_s", "gather_wait_s", "reduce_wait_s")}
        record |= {"hidden_fraction": -most["exposed"]}
        record |= {name: int(most[name]) for name in ("bytes_gathered", "bytes_reduced", "peak_bytes")}
        record |= {"world_size": self.comm.size, "rank_work_s": spread(everyone["work"]), "rank_wait_s": spread(everyone["wait"]),
                   "slowest_rank": int(everyone["work"].argmax())}
        return record, self.stragglers.add(everyone["work"], most["step_s"]), bool(most["asked"])

    def _evaluates_at(self, step: int) -> bool:
        every, last = self.config.train.eval_every, self.config.train.steps
        return self.job.data.eval is not None and step > 0 and (step == last or (every > 0 and step % every == 0))

    def _evaluate(self) -> None:
        self.watchdog.at("the evaluation")
        c, batches = self.config.train, self.job.data.eval
        assert batches is not None
        with weights_to_show(self.job):
            self.evaluation, _ = evaluate(self.sharded, batches, c.micro_batch_size, c.eval_batches)
        self.metrics.write({"step": self.step, "eval_loss": self.evaluation})
        self.console.say(f"step {self.step}/{c.steps}  evaluation loss {self.evaluation:.4f}")

    def _save(self, now: bool) -> None:
        """Write a checkpoint if one is due, or now."""
        self.watchdog.at("the checkpoint")
        self.saver.poll()
        if self.saver.due(self.step, self.config.train.steps) or (now and self.saver.saved_step != self.step):
            self.saver.save(self.step, self.position)
        if now:
            self.saver.wait()

    def _roll_back(self, verdict: Verdict) -> None:
        """To the last checkpoint that is whole; the batches since are passed over: what comes next is what would have come."""
        self.watchdog.at("the way back to a checkpoint")
        self.saver.wait()
        bad, position = self.step, self.position
        if not on_root(self.comm, lambda: publish.candidates(self.saver.root)):
            raise Ended(STOPPED, f"stopped before the update of step {bad}: {verdict.why}; there is no checkpoint to go back to")
        state = resume("auto", self.folder, self.sharded, self.optim, flat(self.config), self.console.say)
        self.step, self.position, self.saver.saved_step = state.step, position, state.step
        if self.checksums is not None:
            self.checksums.updated()
        self.metrics.close()
        tries = self.guard.tries
        self._open_metrics(self.step)
        self.guard.tries, self.guard.good = tries, 0  # the lines that told of them are cut, too
        self._event("rollback", f"from step {bad}: {verdict.why}; its batch and those before it are passed over", from_step=bad)

    def _open_metrics(self, step: int) -> None:
        """Go on in metrics.jsonl with what was done by `step`, and let the guard know of it."""
        path = self.folder / "metrics.jsonl"
        self.metrics = agree(self.comm, lambda: MetricsFile(_cut(path, step) if self.comm.rank == 0 else None))
        lines = on_root(self.comm, lambda: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
        self.evaluated = any("eval_loss" in line and line["step"] == step for line in lines)
        self.guard.remember(lines)

    def _event(self, event: str, why: str, **more: Any) -> None:
        self.metrics.write({"step": self.step, "event": event, "why": why, **more})
        self.console.say(f"step {self.step}: {event}: {why}")


def write_done(folder: Path, content: dict[str, Any]) -> None:
    """Mark a run as complete: the file appears whole or not at all."""
    partial = folder / (DONE + ".partial")
    publish.write_file(partial, (json.dumps(content) + "\n").encode())
    os.replace(partial, folder / DONE)
    publish.sync(folder)


def _cut(path: Path, step: int) -> Path:
    path.touch()
    cut_after(path, step)
    return path


def _may_run(config: Config) -> None:
    """Raise ConfigError if the run directory cannot be written, or holds a run and nobody said what to do about it."""
    folder = Path(config.run.dir)
    if not config.run.resume and is_run(folder):
        raise ConfigError(f"run.dir={config.run.dir} holds a run already: run.resume=auto goes on with it, "
                          "run.resume=never starts over, another run.dir leaves it alone")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"run.dir={config.run.dir} cannot be written ({error.strerror}); choose another") from None


def _open_run(config: Config, step: int) -> None:
    """Make the run directory and write down what is effective; the run is not done from now on."""
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DONE).unlink(missing_ok=True)
    if config.run.resume == "never":
        set_aside(folder)
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")

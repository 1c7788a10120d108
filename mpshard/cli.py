"""The command line: `mpshard train`, alone or under mpirun/srun.

Every command runs on every rank. What is wrong for the user's reasons is one line, printed once, and exit status 2
everywhere; anything else is a bug, whose traceback ends the job (`mpshard.comm.abort`).
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpshard import __version__, launcher
from mpshard.commands import MODULES, Run
from mpshard.config import SCHEMA, ConfigError
from mpshard.recover.status import Ended

if TYPE_CHECKING:
    from mpi4py import MPI

SETTING = re.compile(rf"({'|'.join(SCHEMA.sections)})\.\w+=")
USAGE_STATUS = 2
INTERRUPTED_STATUS = 130
START_LIMIT = 600  # seconds that MPI may take to start: some rank may never come
BROKEN_PIPE_STATUS = 141


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script; exits the process."""
    try:
        status = _main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # | head: not worth a word, not even by Python when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE_STATUS
    except KeyboardInterrupt:  # before or after the world was guarded
        print("mpshard: interrupted", file=sys.stderr, flush=True)
        status = INTERRUPTED_STATUS
        if launcher.launched():
            _die(signal.SIGINT)
    except Exception:
        if not launcher.launched():
            raise
        traceback.print_exc()
        _die(signal.SIGTERM)
    sys.exit(status)


def _die(number: signal.Signals) -> None:
    """End this rank by a signal. One that exits before it has started MPI is nothing to MPICH's launcher, whatever its
    status, and one that exits after that waits in MPI_Finalize: in both cases the others would wait for ever."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _main(argv: Sequence[str] | None) -> int:
    try:
        arguments = parse(argv)
    except Leave as leave:
        if leave.status == 0:
            if launcher.rank() == 0:
                print(leave.text, flush=True)
            return 0
        problem = leave.text
        return in_world(lambda arguments, world: _refuse(problem), argparse.Namespace())
    if hasattr(arguments, "alone"):
        return alone(arguments)
    return in_world(arguments.run, arguments)


def alone(arguments: argparse.Namespace) -> int:
    """Run a command that is no rank's; its status, or 2 after a one-line error."""
    try:
        return arguments.alone(arguments)
    except ConfigError as error:
        _say(error, speaks=True)
        return USAGE_STATUS


def _refuse(problem: str) -> NoReturn:
    raise ConfigError(problem)


def in_world(run: Run, arguments: argparse.Namespace) -> int:
    """Run a command on this rank of the job; 0, or 2 after a one-line error."""
    try:
        world = open_world()
    except ConfigError as error:
        _say(error, speaks=launcher.rank() == 0)
        if launcher.rank() != 0:
            time.sleep(1)  # a launcher kills the others at the first failure: let rank 0 speak before that
        return USAGE_STATUS
    from mpshard.comm import abort, segments

    with abort.guarded(world):
        segments.unlink(world)
        try:
            run(arguments, world)
        except (ConfigError, Ended) as error:  # raised on every rank alike, or else all are ended now
            status = error.status if isinstance(error, Ended) else USAGE_STATUS
            _say(error, speaks=world.rank == 0)
            if not abort.leave_together(world):
                abort.stop(world, "" if world.rank == 0 else f"mpshard: {error}", status)
            return status
        sys.stdout.flush()
    return 0


def open_world() -> MPI.Comm:
    """COMM_WORLD. Raises ConfigError without an MPI library, or if it is not the world that the launcher meant."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "suspicious MPI execution environment")  # said better below
            if launcher.launched():
                faulthandler.dump_traceback_later(START_LIMIT, exit=True, file=sys.__stderr__ or 2)
            from mpshard.comm import world
    except (ImportError, RuntimeError) as error:  # mpi4py is there, but finds no libmpi
        if "MPI" not in str(error):
            raise
        raise ConfigError(f"no MPI library ({str(error).splitlines()[0]}): pip install 'mpshard[mpich]', "
                          "or load your system's MPI") from None
    finally:
        faulthandler.cancel_dump_traceback_later()
    if problem := launcher.wrong_world(world.size):
        raise ConfigError(problem)
    return world


def _say(error: Exception, speaks: bool) -> None:
    if speaks:
        print(f"mpshard: {error}", file=sys.stderr, flush=True)


# -- arguments -------------------------------------------------------------------------------
class Leave(Exception):
    """The arguments ask for nothing but a text (status 0), or are wrong (2)."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class Parser(argparse.ArgumentParser):
    """Hands what it has to say to its caller, which knows that only one rank should."""

    def error(self, message: str) -> NoReturn:
        raise Leave(USAGE_STATUS, f"{message}; see {self.prog} --help")

    def print_help(self, file: Any = None) -> NoReturn:
        raise Leave(0, self.format_help().rstrip())


class Version(argparse.Action):
    def __call__(self, *unused: Any, **options: Any) -> NoReturn:
        raise Leave(0, f"mpshard {__version__}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command. Its section.key=value words may stand anywhere; argparse takes a list's words together."""
    words = list(sys.argv[1:] if argv is None else argv)
    here = words.index("--") if "--" in words else len(words)
    words, command = words[:here], words[here + 1:]  # behind -- comes another command, none of our words
    is_setting = [SETTING.match(word) is not None and before != "--vary" for before, word in zip(["", *words], words, strict=False)]
    rest = [word for word, setting in zip(words, is_setting, strict=True) if not setting]
    arguments = parser().parse_args(rest)
    given = [word for word, setting in zip(words, is_setting, strict=True) if setting]
    if given and not hasattr(arguments, "settings"):
        raise Leave(USAGE_STATUS, f"this command takes no {given[0].partition('=')[0]}; see mpshard COMMAND --help")
    if command and not hasattr(arguments, "command"):
        raise Leave(USAGE_STATUS, f"this command takes nothing behind --, such as {command[0]}; see mpshard COMMAND --help")
    if given:
        arguments.settings = [*arguments.settings, *given]
    if command:
        arguments.command = command
    return arguments


def parser() -> Parser:
    """All commands with their options; each `--help` ends with an example."""
    top = Parser(prog="mpshard", description="Fully sharded training on arrays and MPI.")
    top.add_argument("--version", action=Version, nargs=0, help="show the version and exit")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Run | None, text: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=f"example:\n  {example}",
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.set_defaults(run=run)
        return sub

    for module in MODULES:
        importlib.import_module(f"mpshard.commands.{module}").register(add)
    return top

"""The progress line at a terminal, through launchers too, and plain lines elsewhere."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from mpshard.observe import console as module
from mpshard.observe.console import Console, clock
from tests.launch import _ONE_THREAD, _OPEN_MPI, ROOT, clean_env, is_open_mpi, mpiexec


def test_text_is_printed_as_it_is(capsys):
    text = "a sample:\n[bold]not markup[/bold] :smile: 12 [3] http://x \N{GREEK SMALL LETTER ALPHA}" + " long" * 60
    Console(speaks=True).say(text)
    assert capsys.readouterr().out == text + "\n"


def test_control_characters_do_not_reach_the_terminal(capsys):
    Console(speaks=True).say("a\x1b[31mred\x07\r\x00")
    assert capsys.readouterr().out == "a\\x1b[31mred\\x07\\r\\x00\n"


def test_other_ranks_are_silent(capsys):
    console = Console(speaks=False)
    console.start(3)
    for step in (1, 2, 3):
        console.advance(step, 1.0, 1.0)
    console.say("text")
    console.stop()
    assert capsys.readouterr().out == ""


def test_lines_come_every_few_seconds_and_at_the_end(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    console = Console(speaks=True)
    console.start(total=12, done=2)  # a resumed run
    for step in range(3, 13):
        now[0] += 2
        console.advance(step, loss=1 / step, tokens_per_s=12345.6)
    console.stop()
    assert capsys.readouterr().out.splitlines() == [
        "step 3/12  loss 0.3333  12,346 tokens/s  left 0:18",
        "step 6/12  loss 0.1667  12,346 tokens/s  left 0:12",
        "step 9/12  loss 0.1111  12,346 tokens/s  left 0:06",
        "step 12/12  loss 0.0833  12,346 tokens/s  took 0:20",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(0.9, "0:00"), (65, "1:05"), (3599, "59:59"), (3600, "1:00:00"), (90061, "25:01:01")])
def test_clock(seconds, text):
    assert clock(seconds) == text


SHOW = """
from mpi4py import MPI
from mpshard.observe.console import Console
import time
console = Console(speaks=MPI.COMM_WORLD.rank == 0)
console.start(3)
for step in (1, 2, 3):
    time.sleep(0.3)
    console.advance(step, 1.0, 1.0)
    console.say(f"message {step}")
console.stop()
"""


@pytest.mark.mpi
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("at_terminal", [False, True])
def test_the_line_is_live_where_the_output_is_a_terminal(launched, at_terminal):
    """Also under a launcher, which gives its ranks a pipe, or (Open MPI) a terminal of its own though it writes to a file."""
    env = clean_env(_ONE_THREAD | (_OPEN_MPI if is_open_mpi() else {})) | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    command = [*([mpiexec(), "-n", "2"] if launched else []), sys.executable, "-c", SHOW]
    if not at_terminal:
        said = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True).stdout.decode()
        assert re.sub(r"\d+:\d\d", "TIME", said.replace("\r\n", "\n")).splitlines() == [
            "step 1/3  loss 1.0000  1 tokens/s  left TIME", "message 1", "message 2",
            "step 3/3  loss 1.0000  1 tokens/s  took TIME", "message 3"]
        return
    ours, its = pty.openpty()
    pieces: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(ours, 65536):
                pieces.append(piece)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=its, stderr=its, timeout=60, check=True)
    os.close(its)
    reader.join()
    os.close(ours)
    said = b"".join(pieces).decode()
    assert said.count("\x1b[2K") >= 3  # a line is erased and drawn again
    assert all(f"message {step}" in said for step in (1, 2, 3)) and "step 2/3  loss 1.0000" in said
    assert re.search(r"step 3/3  loss 1.0000  1 tokens/s  took \d+:\d\d$", said.replace("\x1b[?25h", "").rstrip())  # stays, a plain line

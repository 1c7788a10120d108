"""The command line on the stand-in for CuPy: `python -m mpi4py -m tests.device.on_stand_in train CONFIG.toml ...`."""

import sys

from tests.device import lazy_cupy

if __name__ == "__main__":
    with lazy_cupy.installed():
        from mpshard.cli import main

        sys.exit(main(sys.argv[1:]))

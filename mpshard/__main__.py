"""`python -m mpshard X` is `mpshard X`."""

from mpshard.cli import main

if __name__ == "__main__":
    main()

"""`python -m bsi` is `bsi`; `torchrun -m bsi train ...` starts it on many ranks."""

from bsi.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m nstf_convert` is the `nstf` command."""

from nstf_convert.cli import main

if __name__ == "__main__":
    main()

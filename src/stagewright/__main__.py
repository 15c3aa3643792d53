"""`python -m stagewright`: the same as the command `stagewright`."""

from stagewright.cli.main import main

if __name__ == "__main__":
    main()

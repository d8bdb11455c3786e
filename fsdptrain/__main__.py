"""`python -m fsdptrain`, alone or under torchrun."""

from fsdptrain.cli import main

if __name__ == "__main__":
    main()

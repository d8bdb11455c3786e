"""`python -m fsdptrain`, alone or as a rank."""

from fsdptrain.launch.parent import exit_with_parent

if __name__ == "__main__":
    exit_with_parent()  # before the command line is imported

    from fsdptrain.cli import main

    main()

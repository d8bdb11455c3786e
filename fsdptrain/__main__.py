"""`fsdptrain` and `python -m fsdptrain`, alone or as a rank."""

import sys

from fsdptrain.launch.parent import exit_with_parent


def main() -> None:
    """Run the command line. Ctrl-C ends it with one line, also during its imports."""
    try:
        exit_with_parent()  # before the command line is imported
        from fsdptrain.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("fsdptrain: stopped by Ctrl-C\n")
        sys.exit(130)


if __name__ == "__main__":
    main()

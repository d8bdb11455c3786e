"""`fsdptrain` and `python -m fsdptrain`, alone or as a rank."""

import os
import sys

from fsdptrain.rank_variables import RUN_ID


def main() -> None:
    """Run the command line. Ctrl-C ends it with one line, also during its imports."""
    try:
        if RUN_ID in os.environ:  # a rank
            from fsdptrain.launch.parent import exit_with_parent

            exit_with_parent()  # before the command line is imported
        from fsdptrain.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("fsdptrain: stopped by Ctrl-C\n")
        sys.exit(130)


if __name__ == "__main__":
    main()

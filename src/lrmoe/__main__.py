"""``python -m lrmoe`` is the ``lrmoe`` command."""

import sys

from lrmoe.cli import main

if __name__ == "__main__":
    sys.exit(main())

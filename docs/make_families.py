"""Write docs/families.jsonl and docs/families.md: each architecture of transformers, watched and enabled.

python docs/make_families.py            examine what is not in docs/families.jsonl yet (an hour for all, on one core)
python docs/make_families.py --again    examine all
python docs/make_families.py NAME ...   examine these
python docs/make_families.py --page     write the page only
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.families.__main__ import main

if __name__ == "__main__":
    main()

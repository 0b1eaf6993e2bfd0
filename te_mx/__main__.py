"""`python -m te_mx <command>`."""

import sys

from te_mx.commands.main import main

sys.exit(main())

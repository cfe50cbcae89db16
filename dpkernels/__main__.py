"""`python -m dpkernels` is the `dpkernels` command."""

import sys

from dpkernels.cli import main

sys.exit(main())

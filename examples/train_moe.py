#!/usr/bin/env python
"""Train a byte-level GPT whose MLPs are mixtures of 8 experts, in bf16 and in MXFP8, and compare.

    python examples/train_moe.py                 # both runs, a few minutes on two CPU cores
    python examples/train_moe.py --resume        # go on after Ctrl-C

The options, the report and the plot are those of train_gpt.py; on a GPU the model is moe-large.
The block to copy is gpt/moe.py.
"""

import sys

from gpt import stopping

if __name__ == "__main__":
    stopping.at_start()
    import train_gpt  # takes seconds

    sys.exit(train_gpt.main(["--mixture", *sys.argv[1:]], __doc__.splitlines()[0]))

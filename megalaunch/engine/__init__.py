"""The part of megalaunch that needs torch: what workers execute, and the library API.

This file does not import torch: a worker installs its signal handlers and its parent-death signal before it does.
"""

import warnings

# torch warns of pynvml in every process, whoever imports it; nvidia-resiliency-ext (extra nvrx) installs it.
warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)

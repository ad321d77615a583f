"""`megalaunch train --rehearse`: play a run on this machine's CPUs with small sizes, from data to generated text."""

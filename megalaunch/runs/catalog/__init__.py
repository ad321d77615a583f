"""The runs of a folder: find them, summarise and compare them, and free the disk space that they no longer need."""

"""Preprocessing in shards: divide the inputs, write the token files of each shard, and merge them."""

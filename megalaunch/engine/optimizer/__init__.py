"""Update the parameters: rules of optimizers on local shards, Muon over sharded matrices, the learning rate."""

"""What a run spec means, in plain Python: topology, batch math, rules, parameters, FLOPs."""

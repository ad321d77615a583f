"""The plan of a run, in plain Python: topology, batch math, rules, parameters, FLOPs, memory, time, search."""

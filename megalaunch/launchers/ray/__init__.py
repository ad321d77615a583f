"""Ray: one actor on each node of a placement group, which holds the agent there as ssh does elsewhere."""

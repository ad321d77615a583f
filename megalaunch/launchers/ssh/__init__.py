"""ssh: one agent on each host of a list, alive as long as the connection of the process that started it."""

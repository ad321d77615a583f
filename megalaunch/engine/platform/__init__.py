"""What the engine asks of a kind of device: one class a platform, found by the type of a torch device."""

"""The doors, which bring gradients to a Reducer: DDP's hook, and `attach`, which picks the door."""

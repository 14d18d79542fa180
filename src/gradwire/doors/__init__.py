"""The doors, which bring gradients to a Reducer: DDP's hook, and `attach`, which picks the door.

May use: the Reducer and everything below it. Used by: users, through `gradwire.attach`.
"""

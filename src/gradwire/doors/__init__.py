"""Who brings gradients: DDP's hook and the attachment that a user holds, with the state that a checkpoint keeps.

May use: everything that a reduction passes. Used by: users, through `gradwire.attach`.
"""

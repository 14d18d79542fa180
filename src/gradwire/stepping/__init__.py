"""What schemes share that take the optimizer's step themselves, later than the user calls for it.

blocks.py         which parameters are stepped together, and which modules' forward passes need them
demands.py        what such a scheme demands of model and optimizer
frozen_step.py    the user's call of `optimizer.step()`, kept with its hyper-parameters, to be carried out in pieces
guard.py          notices what would go lost: clipping of `.grad`, accumulation without no_sync
interception.py   puts a scheme between the user and the optimizer
finiteness.py     what ranks share of such a step: whether all was finite, and the norm it is clipped by
look_ahead.py     a local step at once, and the global one when its mean is there
loc_buf.py        the copy of the global weights that a local step is taken back to
peeking.py        a local step by the user's optimizer on copies of its state
owner_step.py     each rank steps the values that it owns
sharded_state.py  the optimizer's state, where each rank holds that of its own values
"""

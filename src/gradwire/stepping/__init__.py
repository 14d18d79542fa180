"""What schemes share that take the optimizer's step themselves, later than the user calls for it.

blocks.py        which parameters are stepped together, and which modules' forward passes need them
frozen_step.py   the user's call of `optimizer.step()`, kept with its hyper-parameters, to be carried out in pieces
guard.py         notices what would go lost: clipping of `.grad`, accumulation without no_sync
interception.py  puts a scheme between the user and the optimizer
deferred.py      a block's step just before the block's next forward pass
"""

"""Steps that a scheme takes itself, in the optimizer's place and later than the user calls for them.

blocks.py         which parameters are stepped together, and which modules' forward passes need them
interception.py   puts a scheme between the user and the optimizer; the user's call, kept to be carried out in pieces
look_ahead.py     a local step that is taken back: the backup of the global weights, copies of the optimizer's state
"""

"""Steps that a scheme takes itself, in the optimizer's place and later than the user calls for them."""

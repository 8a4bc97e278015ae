"""Where a kept token is read: position modes, and the rotary tables of a model."""

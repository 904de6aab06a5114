"""A table's way into the house and out of it: preflight, register, unregister."""

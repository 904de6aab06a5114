"""Mirrored tables: the first copy, heap retention, anchoring anew; the pump that follows the changes is in `pump`."""

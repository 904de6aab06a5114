"""Fold: corrections out of the delta into the lake."""

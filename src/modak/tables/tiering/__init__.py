"""A partition's way into the lake: plan → seal → export → commit → reclaim, in that order of files."""

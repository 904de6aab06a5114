"""Words that every room shares: names, the tier-key axis, errors, states, time and fault points. No I/O."""

"""Verify: proves that heap and lake say the same, row by row and column by column."""

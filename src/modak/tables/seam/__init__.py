"""Reading a table across the seam: heap and lake as one table, at one point in time."""

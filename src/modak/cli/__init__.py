"""What people see in a terminal: `modak-worker`. Every command is thin; the work lives in the rooms above."""

"""The daemon: opening the site, leading, the loop over tables, and the demo."""

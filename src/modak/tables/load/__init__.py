"""Stream Load: batches over HTTP, each exactly once by its label, routed to the heap, the delta or staged files."""

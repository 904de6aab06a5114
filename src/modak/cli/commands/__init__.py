"""One file per group of commands; each parses its flags, calls one room and prints what came back."""

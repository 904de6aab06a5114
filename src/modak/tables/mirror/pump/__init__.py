"""The pump: changes out of the WAL into the lake, in the order of its files.

plan → columns, definition → events → buffer, fold → find → write → commit; `flush` and `run` call them.
"""

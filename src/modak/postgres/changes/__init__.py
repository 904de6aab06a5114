"""Changes out of Postgres: slots and publications, two sources of pgoutput messages, and their decoder into Arrow."""

"""Bulk history straight into the lake: inputs → inspect → plan → keys → rows → commit."""

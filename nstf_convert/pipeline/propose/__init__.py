"""The ways every tensor could be stored, with prices and expected losses."""

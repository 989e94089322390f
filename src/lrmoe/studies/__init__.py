"""Studies: each a function that trains or measures and returns a table of records. Needs the ``train`` extra."""
